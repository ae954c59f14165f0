from __future__ import annotations

import locale
import os
import sys

UTF8_MODE = "PYTHONUTF8"
NO_DOCSTRINGS = "python -OO (PYTHONOPTIMIZE=2) removes docstrings, which transformers needs; use -O instead"


def refuse_or_begin_anew() -> None:
    """Exit if Python drops docstrings (-OO), and restart it in UTF-8 mode if it does not use UTF-8."""
    if sys.flags.optimize > 1:
        print(NO_DOCSTRINGS, file=sys.stderr)
        sys.exit(2)
    encodings = {sys.getfilesystemencoding().lower(), locale.getpreferredencoding(False).lower()}
    if encodings != {"utf-8"} and os.environ.get(UTF8_MODE) != "1":  # else the user insists: python -X utf8=0
        os.execve(sys.executable, sys.orig_argv, os.environ | {UTF8_MODE: "1"})
