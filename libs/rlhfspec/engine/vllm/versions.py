"""The versions of vLLM whose samplers `inside/` replaces. Private names change from one to the next, so others are
refused by name; `make setup-vllm` installs the first."""

SUPPORTED = ("0.32.0",)


def arithmetic(version: str, platform: str) -> str:
    """What a run's manifest says that its tokens were computed by.

    >>> arithmetic("0.32.0", "cpu")
    'vllm-0.32-cpu'
    """
    return f"vllm-{'.'.join(version.split('.')[:2])}-{platform}"
