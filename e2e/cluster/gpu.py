"""GPUs that are none: a device plugin that tells a node's kubelet of `nvidia.com/gpu`.

    python -m cluster.gpu DEVICE_PLUGINS_FOLDER 4

Healthy devices are the lines of DEVICE_PLUGINS_FOLDER/gpus, read again when it changes. The kubelet's protocol is
three small messages; they are spelled out here, field by field.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

RESOURCE = "nvidia.com/gpu"


def text(number: int, value: str | bytes) -> bytes:
    """A protobuf field of that number: a string, or a message inside.

    >>> text(2, "gpu0").hex()
    '120467707530'
    """
    content = value.encode() if isinstance(value, str) else value
    assert len(content) < 128
    return bytes([number << 3 | 2, len(content)]) + content


def devices(names: list[str]) -> bytes:
    """A ListAndWatchResponse."""
    return b"".join(text(1, text(1, name) + text(2, "Healthy")) for name in names)


class Plugin:
    def __init__(self, folder: Path, num: int) -> None:
        self._folder, self._listed = folder, folder / "gpus"
        if not self._listed.exists():
            self._listed.write_text("".join(f"gpu{number}\n" for number in range(num)))

    def serve(self) -> None:
        """For good; registers again when the kubelet was restarted (it removes all sockets)."""
        own, kubelet = self._folder / "rlhfspec-gpu.sock", self._folder / "kubelet.sock"
        while True:
            while not kubelet.exists():
                time.sleep(0.1)
            own.unlink(missing_ok=True)
            server = grpc.server(ThreadPoolExecutor(8), handlers=[self._handlers()])
            server.add_insecure_port(f"unix://{own}")
            server.start()
            try:
                self._register(kubelet, own.name)
            except grpc.RpcError as error:
                print(f"registering again: {error}", flush=True)
                time.sleep(0.2)
            while own.exists():
                time.sleep(0.2)
            server.stop(None)

    def _register(self, kubelet: Path, name: str) -> None:
        with grpc.insecure_channel(f"unix://{kubelet}") as channel:
            call = channel.unary_unary("/v1beta1.Registration/Register", _as_is, _as_is)
            call(text(1, "v1beta1") + text(2, name) + text(3, RESOURCE), timeout=10)

    def _handlers(self) -> grpc.GenericRpcHandler:
        unary = grpc.unary_unary_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            "v1beta1.DevicePlugin",
            {
                "GetDevicePluginOptions": unary(lambda *_: b"", _as_is, _as_is),
                "ListAndWatch": grpc.unary_stream_rpc_method_handler(self._watch, _as_is, _as_is),
                "Allocate": unary(self._allocate, _as_is, _as_is),
            },
        )

    def _watch(self, _: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        last: list[str] | None = None
        while context.is_active():
            if (now := self._listed.read_text().split()) != last:
                last = now
                yield devices(now)
            time.sleep(0.1)

    def _allocate(self, request: bytes, _: grpc.ServicerContext) -> bytes:
        """One answer for each container: it finds its devices' number in its environment, as with NVIDIA's plugin."""
        answers = b""
        while request:
            content, request = request[2 : 2 + request[1]], request[2 + request[1] :]
            names = []
            while content:
                names.append(content[2 : 2 + content[1]].decode())
                content = content[2 + content[1] :]
            answers += text(1, text(1, text(1, "NVIDIA_VISIBLE_DEVICES") + text(2, ",".join(names))))
        return answers


def _as_is(message: bytes) -> bytes:
    return message


def main() -> None:
    Plugin(Path(sys.argv[1]), int(sys.argv[2])).serve()


if __name__ == "__main__":
    main()
