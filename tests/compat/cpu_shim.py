# CPU shim for running PyTorch's own FSDP tests on gloo/CPU ranks. A measuring instrument only.
# Used as sitecustomize (run_suite.py does that). Active only if PTESTS_CPU_WS is set. It hooks module import and
# changes nothing on disk. It may change where a test runs, never what it asserts.
#   PTESTS_CPU_WS=2                 the world size
#   PTESTS_IMPL_HOOK=module:func    called with torch.distributed.fsdp right after its import, in every process:
#                                   puts another implementation in place
#   PTESTS_STOCK_FSDP1_CPU=1        lets stock torch's classic FSDP accept the CPU as its device (for a baseline)
#   PTESTS_START=forkserver|spawn   how ranks are started (forkserver: torch is imported once, not once per rank)
#   PTESTS_NOTES=dir                each rank appends one JSON line per test: assertions reached, CPU seconds, skip reason
import os, sys

if os.environ.get("PTESTS_CPU_WS"):
    import importlib.abc, importlib.util
    WS = int(os.environ["PTESTS_CPU_WS"])
    START = os.environ.get("PTESTS_START", "forkserver")
    VACUOUS = "VACUOUS: "

    # ---- helpers -----------------------------------------------------------------------------------------------
    def _caller(depth=2):
        return sys._getframe(depth).f_globals.get("__name__", "")

    def _is_test(name):
        return name in ("__main__", "__mp_main__") or name.startswith("test_")

    def _skip(why):
        def f(*a, **k):
            import unittest
            raise unittest.SkipTest(why)
        return f

    def _nothing(*a, **k):
        return None

    # ---- torch: what torch.cpu lacks, and the device counts ----------------------------------------------------
    STATS = "needs accelerator memory statistics"
    TIMING = "needs accelerator timing"
    CPU_EXTRA = dict(
        {n: _nothing for n in "empty_cache ipc_collect reset_peak_memory_stats reset_accumulated_memory_stats "
                              "_sleep _clear_workspaces".split()},
        **{n: _skip(STATS) for n in "memory_stats memory_allocated max_memory_allocated memory_reserved "
                                    "max_memory_reserved memory_summary mem_get_info".split()},
        **{n: _skip("needs accelerator properties") for n in "get_device_properties get_device_capability".split()})

    def _patch_torch(torch):
        cpu = torch.cpu
        for name, f in CPU_EXTRA.items():
            if not hasattr(cpu, name):
                setattr(cpu, name, f)
        if not hasattr(cpu, "manual_seed"):
            cpu.manual_seed = cpu.manual_seed_all = lambda seed: torch.manual_seed(seed)
        if hasattr(cpu, "Event"):
            class Event(cpu.Event):
                def __init__(self, *a, **k): super().__init__()
                elapsed_time = _skip(TIMING)
            cpu.Event = Event
        for name in ("synchronize", "query"):
            if hasattr(cpu, "Stream") and not hasattr(cpu.Stream, name):
                setattr(cpu.Stream, name, _nothing)
        cpu.device_count = lambda: WS
        real_device = cpu.current_device
        cpu.current_device = lambda: None if _is_test(_caller()) else real_device()
        acc = torch.accelerator
        real_count, real_acc = acc.device_count, acc.current_accelerator
        acc.device_count = lambda: WS if _is_test(_caller()) or _caller().startswith("torch.testing.") else real_count()
        acc.current_accelerator = lambda check_available=False: (
            torch.device("cpu") if _is_test(_caller()) else real_acc(check_available))
        if not torch.cuda.is_available():      # pinning has no meaning without an accelerator
            torch.Tensor.pin_memory = lambda self, *a, **k: self

    # ---- the test harness --------------------------------------------------------------------------------------
    def _patch_common_utils(m):
        if not hasattr(m, "HardwareClassification"):
            import enum
            m.HardwareClassification = enum.Enum("HardwareClassification", "GENERIC ACCELERATOR CPU CUDA")
        m.get_cycles_per_ms = lambda: 1.0      # _sleep does nothing here
        _count_asserts(m.TestCase)

    ASSERTS = [0]

    def _count_asserts(*classes):
        import functools, unittest
        for cls in (unittest.TestCase, *classes):
            for name, f in list(vars(cls).items()):
                if name.startswith("assert") and callable(f) and not hasattr(f, "_counted"):
                    def g(*a, _f=f, **k):
                        ASSERTS[0] += 1
                        return _f(*a, **k)
                    g = functools.wraps(f)(g)
                    g._counted = True
                    setattr(cls, name, g)

    def _note(**kw):
        d = os.environ.get("PTESTS_NOTES")
        if d:
            import json
            with open(os.path.join(d, f"{os.getpid()}.jsonl"), "a") as f:
                f.write(json.dumps(kw) + "\n")

    def _watched(self, test_name, rank):
        """Let the rank's test body leave a note of what it did."""
        import time, unittest
        fn = getattr(self, test_name)
        def body():
            n, t, why = ASSERTS[0], time.thread_time(), None
            try:
                return fn()
            except unittest.SkipTest as e:
                why = str(e)
                raise
            except SystemExit as e:
                why = f"exit {e.code}"
                raise
            finally:
                _note(test=f"{type(self).__name__}.{test_name}", rank=rank, skip=why,
                      asserts=ASSERTS[0] - n, cpu_s=round(time.thread_time() - t, 5))
        setattr(self, test_name, body)

    def _patch_common_distributed(m):
        import functools, unittest

        def skip_if_lt_x_gpu(x, *, allow_cpu=False):
            def deco(func):
                if isinstance(func, type):
                    return func if x <= WS else unittest.skip(f"needs {x} ranks")(func)
                @functools.wraps(func)
                def wrapper(*a, **k):
                    if x <= WS or allow_cpu:
                        return func(*a, **k)
                    raise unittest.SkipTest(f"needs {x} ranks")
                return wrapper
            return deco
        m.skip_if_lt_x_gpu = skip_if_lt_x_gpu
        m.requires_nccl = lambda: (lambda f: f)
        m.requires_nccl_version = lambda *a, **k: (lambda f: f)

        P, T = m.MultiProcessTestCase, m.MultiThreadedTestCase
        if START == "forkserver":
            def _spawn_processes(self):
                import torch
                ctx = torch.multiprocessing.get_context("forkserver")
                ctx.set_forkserver_preload(["torch.testing._internal.common_fsdp", type(self).__module__])
                self._start_processes(ctx.Process)
            P._spawn_processes = _spawn_processes

        p_check, p_run, t_join, t_run = P._check_return_codes, P.run_test, T._join_threads, T.run_test_with_threaded_pg
        def check(self, *a, **k):
            if not self.processes:
                raise unittest.SkipTest(VACUOUS + "no rank was started")
            for rank, p in enumerate(self.processes):     # died of a signal other than the harness's own SIGTERM
                if (p.exitcode or 0) < 0 and p.exitcode != -15:
                    _note(test=f"{type(self).__name__}.{self._testMethodName}", rank=rank, signal=-p.exitcode)
            return p_check(self, *a, **k)
        def run_test(self, test_name, *a, **k):
            _watched(self, test_name, self.rank)
            return p_run(self, test_name, *a, **k)
        def join(cls, threads, fn):
            if not threads:
                raise unittest.SkipTest(VACUOUS + "no rank was started")
            return t_join(threads, fn)
        def run_threaded(self, test_name, rank, world_size):
            _watched(self, test_name, rank)
            return t_run(self, test_name, rank, world_size)
        P._check_return_codes, P.run_test = check, run_test
        T._join_threads, T.run_test_with_threaded_pg = classmethod(join), run_threaded

    def _patch_common_fsdp(m):
        m.DEVICE_COUNT = WS
        if not hasattr(m, "test_compiled_fsdp"):          # renamed after 2.6
            m.test_compiled_fsdp = m.compiled_fsdp_test
        import functools
        m.ShardedGradScaler = functools.partial(m.ShardedGradScaler, device="cpu")     # its default is the GPU
        # Left out: the parity sub-case which expects an error because offloaded parameters sit on the accelerator
        # instead of the CPU. With the CPU as the only device it has no meaning; the test's other sub-cases run.
        mixin = getattr(m, "FSDPTestMixin", m.FSDPTest)
        real_parity = mixin._test_fsdp_parity
        def parity(self, model_class, fsdp_init_mode, device_init_mode, *a, **k):
            offload = k.get("cpu_offload")
            if offload is not None and offload.offload_params and device_init_mode == m.DEVICEInitMode.DEVICE_AFTER:
                return None
            return real_parity(self, model_class, fsdp_init_mode, device_init_mode, *a, **k)
        mixin._test_fsdp_parity = parity
        if hasattr(m, "FSDPTestContinuous"):
            m.FSDPTestContinuous.world_size = WS
        def cap(cls):
            p = cls.__dict__.get("world_size")
            if isinstance(p, property):
                cls.world_size = property(lambda self, f=p.fget: min(WS, f(self)))
        def init_subclass(cls, **k):
            super(m.FSDPTest, cls).__init_subclass__(**k)
            cap(cls)
        m.FSDPTest.__init_subclass__ = classmethod(init_subclass)

    def _patch_inductor_utils(m):
        if not hasattr(m, "HAS_CUDA"):         # renamed after 2.6
            m.HAS_CUDA = False

    def _patch_replicate(m):
        import functools
        orig = m.replicate
        @functools.wraps(orig)
        def replicate(*a, **k):
            if k.get("device_ids"):
                k["device_ids"] = None
            return orig(*a, **k)
        m.replicate = replicate

    HOOKS = {
        "torch": _patch_torch,
        "torch.testing._internal.common_utils": _patch_common_utils,
        "torch.testing._internal.common_distributed": _patch_common_distributed,
        "torch.testing._internal.common_fsdp": _patch_common_fsdp,
        "torch.testing._internal.inductor_utils": _patch_inductor_utils,
        "torch.distributed._composable": _patch_replicate,
    }

    # ---- what is under test ------------------------------------------------------------------------------------
    if os.environ.get("PTESTS_STOCK_FSDP1_CPU") == "1":
        def _patch_stock_fsdp1(m):
            import torch
            orig = m._init_device_handle
            def _init_device_handle(state, module, ignored_params, device_id):
                try:
                    return orig(state, module, ignored_params, device_id)
                except RuntimeError as e:
                    if "non-CPU accelerator" not in str(e):
                        raise
                    state._device_handle = m._FSDPDeviceHandle.from_device(torch.device("cpu"))
                    return state
            m._init_device_handle = _init_device_handle
            m._check_module_states_for_sync_module_states = lambda states: None    # refuses CPU states
        HOOKS["torch.distributed.fsdp._init_utils"] = _patch_stock_fsdp1

    _hook = os.environ.get("PTESTS_IMPL_HOOK")
    if _hook:
        def _patch_impl(m):
            import importlib
            mod, fn = _hook.split(":")
            getattr(importlib.import_module(mod), fn)(m)
        HOOKS["torch.distributed.fsdp"] = _patch_impl

    # ---- import hook -------------------------------------------------------------------------------------------
    class _L(importlib.abc.Loader):
        def __init__(self, inner, name): self.inner, self.name = inner, name
        def create_module(self, spec): return self.inner.create_module(spec)
        def exec_module(self, mod):
            self.inner.exec_module(mod)
            HOOKS[self.name](mod)
        def __getattr__(self, a): return getattr(self.inner, a)

    class _F(importlib.abc.MetaPathFinder):
        busy = set()
        def find_spec(self, name, path=None, target=None):
            if name not in HOOKS or name in self.busy:
                return None
            self.busy.add(name)
            try:
                spec = importlib.util.find_spec(name)
            finally:
                self.busy.discard(name)
            if spec and spec.loader:
                spec.loader = _L(spec.loader, name)
            return spec
    sys.meta_path.insert(0, _F())


def refuse_all(fsdp):
    """An implementation that refuses to work (--impl cpu_shim:refuse_all): a test that passes with it measures nothing."""
    import sys

    def fully_shard(*a, **k):
        raise NotImplementedError("refuse_all")
    fully_shard.state = fully_shard

    class FullyShardedDataParallel(fsdp.FullyShardedDataParallel):
        def __init__(self, *a, **k):
            raise NotImplementedError("refuse_all")
    for name, mod in list(sys.modules.items()):
        if name.startswith(("torch.distributed.fsdp", "torch.distributed._composable")):
            for new in (fully_shard, FullyShardedDataParallel):
                if callable(getattr(mod, new.__name__, None)):
                    setattr(mod, new.__name__, new)
