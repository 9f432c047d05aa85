"""Whether repositories of the Hugging Face hub can be reached, within a few seconds."""

from __future__ import annotations

import threading

from xtk.errors import XtkError

HUB_TIMEOUT_SECONDS = 8.0


def check_dataset_reachable(dataset: str) -> None:
    """Refuse a hub dataset (`owner/name`) that cannot be reached, after at most HUB_TIMEOUT_SECONDS."""
    reason = hub_error(dataset, "dataset")
    if reason is not None:
        raise XtkError(
            f"this data is not a local file or folder, and loading it from the Hugging Face hub failed: {reason}",
            where=dataset,
            hint="check the spelling, the network and HF_ENDPOINT; for a gated or private dataset, run hf auth login",
        )


def hub_error(name: str, kind: str) -> str | None:
    """Return the reason why a hub repository cannot be reached; None if it can, or if HF_HUB_OFFLINE is set.

    The request runs in a thread, since resolving the address can take minutes, which no client timeout limits.
    """
    from huggingface_hub import HfApi, constants

    if constants.HF_HUB_OFFLINE:
        return None
    reasons: list[str | None] = []

    def request_repo_info() -> None:
        try:
            HfApi().repo_info(name, repo_type=kind, timeout=HUB_TIMEOUT_SECONDS / 2)
            reasons.append(None)
        except Exception as failure:  # the hub client has dozens of error types
            reasons.append(next(iter(str(failure).splitlines()), "") or type(failure).__name__)

    thread = threading.Thread(target=request_repo_info, daemon=True)
    thread.start()
    thread.join(HUB_TIMEOUT_SECONDS)
    return reasons[0] if reasons else f"{constants.ENDPOINT} did not respond within {HUB_TIMEOUT_SECONDS:.0f} seconds"
