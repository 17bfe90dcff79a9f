"""A simulated accelerator: a device of torch, `sim`, with everything that the library asks of a GPU, in plain Python.

`install()` makes it the accelerator of this process, for good. Nothing is compiled. Arithmetic is done by torch's CPU
kernels, one operation at a time. What is simulated is what goes wrong on a device and not on a CPU:

- `memory`: each device has memory of its own, counted and bounded, filled with NaN before it is written to.
  A tensor in it cannot be read without a copy, nor be mixed with one of another device.
- `streams`: a copy with `non_blocking=True` is done when somebody waits for it, and at no other time. Whoever forgets
  to wait reads NaN; whoever writes to the source too early sends the wrong bytes.
- `faults`: a copy that was meant to run beside other work and cannot (its memory on the host is not pinned), and memory
  that is freed while a copy into it is on its way.
- `kernels`: how operations of torch get here.
- `module`: `torch.sim`, `torch.accelerator`, `torch.Stream`, `torch.Event`, `torch.Generator` and pinned memory.
- `collectives`: a backend of `torch.distributed` that sends tensors of the device by gloo, "simccl".

Kernels run at once, on whatever stream: a kernel that does not wait for another one is not seen, a copy is. Gradients
are known to device 0 alone, since torch's engine has a thread for no other that is made in Python. And there is no
time: nothing here tells how fast a device is.
"""

from tests.accelerator.faults import Waits, faults, no_faults, waits
from tests.accelerator.memory import Device, devices
from tests.accelerator.module import install

NAME = "sim"

__all__ = ["NAME", "Device", "Waits", "devices", "faults", "install", "no_faults", "waits"]
