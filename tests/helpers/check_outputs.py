"""Run saved outputs in whatever transformers is installed, and say how each differs from what its writer saw. Needs only torch.

    python check_outputs.py DENSE PRUNED DENSE PRUNED …

A folder holds ``expected.safetensors``: ``ids`` [1, tokens], and the ``logits`` that the writer's model gave for them. One line
of JSON per pair: ``version``; of the pruned model, ``logits``: the largest difference relative to the largest logit; for each way
to generate its tokens, or the error: ``cached``, ``uncached``, ``static`` (static cache, prompt in chunks), ``beam`` and
``beam_uncached``; ``failed`` alone where the folder does not load. ``dense`` says the same of the dense model, where the pruned one
is not right.
"""

import json
import sys
import warnings

import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

WAYS = {
    "cached": {},
    "uncached": {"use_cache": False},
    "static": {"cache_implementation": "static", "prefill_chunk_size": 5},
    "beam": {"num_beams": 3},
    "beam_uncached": {"num_beams": 3, "use_cache": False},
}
SAME = (("cached", "uncached"), ("static", "cached"), ("beam", "beam_uncached"))  # ways that give the same tokens
TOLERANCE = 1e-5


def load(folder):
    (name,) = AutoConfig.from_pretrained(folder, trust_remote_code=True).architectures
    auto = AutoModelForImageTextToText if name.endswith("ForConditionalGeneration") else AutoModelForCausalLM
    return auto.from_pretrained(folder, trust_remote_code=True, attn_implementation="eager").eval()


@torch.no_grad()
def check(folder):
    try:
        model, expected = load(folder), load_file(f"{folder}/expected.safetensors")
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
    ids = expected["ids"]
    logits = model(input_ids=ids).logits
    found = {"logits": float((logits - expected["logits"]).abs().max() / expected["logits"].abs().max())}
    model.generation_config.eos_token_id = None
    options = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 1}
    for way, own in WAYS.items():
        try:
            found[way] = model.generate(ids, **options, **own)[0, ids.shape[1] :].tolist()
        except Exception as error:  # told: a class may lack a way, dense, too
            found[way] = f"{type(error).__name__}: {str(error)[:200]}"
    return found


def is_right(found):
    """Tell whether nothing is to be asked of the dense model."""
    if "failed" in found or not found["logits"] <= TOLERANCE:
        return False
    return all(isinstance(found[way], list) for way in WAYS) and all(found[way] == found[plain] for way, plain in SAME)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for dense, pruned in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        found = check(pruned)
        told = {"version": transformers.__version__, **found} | ({} if is_right(found) else {"dense": check(dense)})
        print(json.dumps(told), flush=True)
