"""Import llm-compressor without what it logs to stdout at that moment (no accelerator), which would end up in JSON."""

import os
import sys

_LEVEL = "LLM_COMPRESSOR_LOG_LEVEL"

if "llmcompressor" not in sys.modules and _LEVEL not in os.environ:
    os.environ[_LEVEL] = "ERROR"
    try:
        import llmcompressor.modifiers.transform  # noqa: F401  (asks for a device while it is imported)
        from llmcompressor.logger import LoggerConfig, configure_logger
    finally:
        del os.environ[_LEVEL]
    configure_logger(LoggerConfig())
