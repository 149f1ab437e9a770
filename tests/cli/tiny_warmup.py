"""`mlactl` with profiles that need tiny kernels: real compiles, real processes, and kernels that fail, die or dawdle on demand.

Run as a program it is the command line; as `--worker`, one of its compile workers. TINY_* variables say what happens.
"""

import os
import signal
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve()
sys.path[:0] = [str(HERE.parent), str(HERE.parents[1] / "store")]
KERNEL_ID = "test.tiny"


def _numbers(name):
    return [int(part) for part in os.environ.get(name, "").split(",") if part]


def build(facts):
    """The kernel's builder: notes that it ran, then does what the environment says for this factor."""
    factor = facts["factor"]
    log = os.environ.get("TINY_LOG")
    if log:
        with open(log, "a") as file:
            file.write(f"{factor} {os.getpid()}\n")
    if factor in _numbers("TINY_RELEASE"):
        Path(os.environ["TINY_BARRIER"]).touch()
        time.sleep(0.5)
    time.sleep(float(os.environ.get("TINY_SLOW_S", "0")))
    if factor in _numbers("TINY_FAIL"):
        raise RuntimeError(f"no code for factor {factor}")
    if factor in _numbers("TINY_DIE"):
        print("about to run out of memory", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    if factor in _numbers("TINY_EMPTY"):
        import cutlass.cute as cute

        class Exported:
            def export_to_c(self, *_, **__):
                pass

        cute.compile = lambda *_, **__: Exported()
    import tiny_kernel

    return tiny_kernel.build(facts)


def patch():
    """Declares the tiny kernel and makes every profile need TINY_COUNT of it."""
    from mlactl.cache import toolchain
    from mlactl.kernels import registry
    from mlactl.profiles import Profile
    from mlactl.warmup import pool

    kernel = registry.Kernel(
        kernel_id=KERNEL_ID,
        version=1,
        facts=(registry.Fact("factor", int, "multiplier", tuple(range(64))), registry.Fact("dtype", str, "element type", ("f32",))),
        scalars=(),
        history=(registry.Bump(1, "first"),),
        sources=(str(HERE.parents[1] / "store" / "tiny_kernel.py"),),
        builder="tiny_warmup:build",
    )
    registry.KERNELS = {**registry.KERNELS, KERNEL_ID: kernel}
    specs = tuple(kernel.spec(factor=factor, dtype="f32") for factor in range(int(os.environ.get("TINY_COUNT", "3"))))
    unbuilt = tuple(registry.SPARSE_DECODE.spec(**_sparse_facts(output)) for output in ("split", "direct")) if os.environ.get("TINY_UNBUILT") else ()
    Profile.specs = lambda self, identities=None: specs + unbuilt
    if unbuilt:
        registry.KERNELS = {**registry.KERNELS, registry.SPARSE_DECODE.kernel_id: _without_builder(registry.SPARSE_DECODE)}
    pool.WORKER_COMMAND = (sys.executable, str(HERE), "--worker")
    if os.environ.get("TINY_NO_COMPILER"):
        toolchain._probe = lambda: "nvidia-cutlass-dsl is not installed"


def _sparse_facts(output):
    return {"tile": "heads16", "output": output, "q_dtype": "bf16", "record": "fp8_ds_mla", "latent_scale_identity": 1}


def _without_builder(kernel):
    import dataclasses

    return dataclasses.replace(kernel, builder=None)


def _compile_in_a_fork(arch):
    """Compiles one object in a child forked from a process that had imported the compiler; prints the entry's path."""
    import cutlass.cute  # noqa: F401

    from mlactl.cache.publish import compile_and_publish
    from mlactl.cache.store import Store
    from mlactl.kernels import registry

    pid = os.fork()
    if pid == 0:
        result = compile_and_publish(Store.open(), registry.KERNELS[KERNEL_ID].spec(factor=7, dtype="f32"), arch)
        os.write(1, f"{result.entry.object_path}\n".encode())
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def main():
    patch()
    if sys.argv[1:] == ["--worker"]:
        from mlactl.warmup import worker

        return worker.main()
    if sys.argv[1:2] == ["--forked"]:
        return _compile_in_a_fork(sys.argv[2])
    barrier = os.environ.get("TINY_WAIT")
    while barrier and not Path(barrier).exists():
        time.sleep(0.005)
    from mlactl.cli.app import main as command_line

    return command_line()


if __name__ == "__main__":
    sys.exit(main())
