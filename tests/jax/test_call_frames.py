"""Call frames as XLA fills them in, made by hand: those of a GPU that is not there, and those that do not fit."""

from __future__ import annotations

import shutil

import pytest

pytestmark = pytest.mark.slow

FRAME = """
import ctypes
from types import SimpleNamespace
from spattn.dispatch import plans
from spattn import cpu
from spattn.cuda.host import execute
from spattn.jax import _c_api as c_api
from spattn.jax import _foreign

class Gpu:
    '''A device that is not there: its memory is the host's.'''
    ordinal, name, entered = 5, "none", 0
    def __enter__(self):
        self.entered += 1
    def __exit__(self, *error):
        pass
    def is_capturing(self, stream):
        return False

class Runtime:
    '''XLA's side of a frame: its functions, and what they were asked for.'''
    def __init__(self):
        self.asked, self.memory, self.errors, self.fail = [], {}, [], None
        functions = {name: c_api.Api._fields_[2 + n][1](getattr(self, name, 0)) for n, (name, _) in
                     enumerate(c_api.Api._fields_[2:]) if hasattr(self, name)}
        self.api = c_api.Api(struct_size=ctypes.sizeof(c_api.Api), **functions)

    def create_error(self, at):
        made = c_api.NewError.from_address(at)
        self.errors.append((made.message.decode(), made.code))
        return len(self.errors)
    def get_message(self, at):
        about = c_api.ErrorMessage.from_address(at)
        about.message = self.errors[about.error - 1][0].encode()
    def destroy_error(self, at):
        self.asked.append("destroy")
    def get_stream(self, at):
        c_api.Stream.from_address(at).stream = 77
    def get_ordinal(self, at):
        asked = c_api.DeviceOrdinal.from_address(at)
        assert asked.context == 1234 and asked.struct_size == ctypes.sizeof(asked)
        asked.ordinal = 5
    def allocate(self, at):
        asked = c_api.NewMemory.from_address(at)
        if self.fail or asked.alignment > 16:
            self.errors.append((self.fail or f"Unsupported alignment: {asked.alignment}", 8))
            return len(self.errors)
        memory = np.zeros(asked.size, np.uint8)
        self.memory[memory.ctypes.data] = memory
        asked.data = memory.ctypes.data
    def free(self, at):
        asked = c_api.Memory.from_address(at)
        assert self.memory[asked.data].size == asked.size
        self.asked.append(("free", asked.size))

def tensors(arrays):
    codes = {"float32": 11, "float64": 12, "float16": 10, "bfloat16": 16}
    made = [c_api.Tensor(struct_size=48, dtype=codes[str(x.dtype)], data=x.ctypes.data, rank=x.ndim,
                         dims=(ctypes.c_int64 * x.ndim)(*x.shape)) for x in arrays]
    pointers = (ctypes.POINTER(c_api.Tensor) * len(made))(*map(ctypes.pointer, made))
    return c_api.Tensors(struct_size=40, size=len(made), all=pointers)

def frame(runtime, operands, results, pattern=WINDOW, scale=0.25):
    text = _foreign.Options(pattern.to_json(), scale, "auto", None).text.encode()
    span = c_api.ByteSpan(ctypes.cast(ctypes.c_char_p(text), ctypes.c_void_p), len(text))
    attributes = c_api.Attributes(
        struct_size=48, size=1, types=(ctypes.c_int * 1)(c_api.STRING),
        all=(ctypes.c_void_p * 1)(ctypes.addressof(span)))
    made = c_api.CallFrame(struct_size=ctypes.sizeof(c_api.CallFrame), api=ctypes.pointer(runtime.api), context=1234,
                           stage=3, operands=tensors(operands), results=tensors(results), attributes=attributes)
    made.keep = text, span
    return made

def call(function, runtime, *args, on_gpu=True, **options):
    made = frame(runtime, *args, **options)
    return _foreign._handle(function, on_gpu, ctypes.pointer(made))
"""

ON_GPU = """
given, upstream = problem()
(out, lse), gradients = expected(given, upstream)
seen = []

def host(x):
    '''What an operand's address holds.'''
    size = int(np.prod(x.shape))
    return np.ndarray(x.shape, np.float32, (ctypes.c_float * size).from_address(x.pointer))

class Kernels:
    '''Computes with NumPy what kernels would, where XLA's buffers lie.'''
    @staticmethod
    def forward(run):
        seen.append(run.stream)
        work = run.allocate(1000)
        out, lse = cpu.forward(*(host(x) for x in (run.q, run.k, run.v)), run.plan, run.scale)
        host(run.out)[...] = out
        np.ndarray(lse.shape, np.float32, (ctypes.c_float * lse.size).from_address(run.lse))[...] = lse
    @staticmethod
    def backward_requests(run):
        return []
    @staticmethod
    def backward(run):
        seen.append(run.stream)
        run.allocate(2000)
        names = "dout", "q", "k", "v", "out", "lse"
        found = cpu.backward(*(host(getattr(run, x)) for x in names), run.plan, run.scale, dlse=host(run.dlse))
        for x, made in zip((run.dq, run.dk, run.dv), found):
            host(x)[...] = made

gpu = Gpu()
class Backend:
    LIMITS = SimpleNamespace(host_arrays=False, precisions=(), moves=False, predicts=False, rows=False)
    memory = staticmethod(cpu.memory)
    plan_for = staticmethod(cpu.plan_for)
    prepare = staticmethod(lambda call, plan: execute.Forward(call, plan, Kernels.forward, gpu, None))
    prepare_backward = staticmethod(lambda call, plan: execute.Backward(call, plan, gpu, lambda: Kernels))

loaded = []
def load(name):
    loaded.append(name)
    return Backend
plans.load = load
"""


def test_on_a_gpu_kernels_read_and_write_xlas_buffers(program):
    """On XLA's stream, in the device's context, with memory of XLA's that it gets back. Nothing is copied."""
    program(
        FRAME
        + ON_GPU
        + """
runtime, results = Runtime(), [np.zeros_like(x) for x in (out, lse)]
for _ in range(2):
    assert call(_foreign._attention, runtime, given, results) is None, runtime.errors
    assert all(map(np.array_equal, results, (out, lse)))
slopes = [np.zeros_like(x) for x in gradients]
assert call(_foreign._attention_backward, runtime, (*upstream, *given, out, lse), slopes) is None, runtime.errors
assert all(map(np.array_equal, slopes, gradients))
assert seen == [77] * 3 and gpu.entered == 3 and set(loaded) == {"cuda"} and len(loaded) == 2
assert runtime.asked == [("free", 1000)] * 2 + [("free", 2000)]
"""
    )


def test_errors_on_a_gpu_are_xlas(program):
    """What XLA cannot give is its message; whatever goes wrong, memory is given back and nothing leaves the handler."""
    program(
        FRAME
        + ON_GPU
        + """
runtime, results = Runtime(), [np.zeros_like(x) for x in (out, lse)]
runtime.fail = "out of memory: 1000 bytes"
assert call(_foreign._attention, runtime, given, results) == 2
assert runtime.errors[-1] == ("MemoryError: XLA: out of memory: 1000 bytes", 8) and runtime.asked == ["destroy"]
runtime.fail = None
right = cpu.forward
def wrong(*args):
    raise KeyboardInterrupt("stop")
cpu.forward = wrong
assert call(_foreign._attention, runtime, given, results) == 3
assert runtime.errors[-1] == ("KeyboardInterrupt: stop", 1) and runtime.asked[1:] == [("free", 1000)]
cpu.forward = right
swapped = [np.zeros_like(lse), np.zeros_like(out)]
assert call(_foreign._attention, runtime, given, swapped)
assert runtime.errors[-1][0].startswith("RuntimeError: results: expected float32 of shape (2, 4, 50, 24), got")
"""
    )


def test_a_runtime_without_what_is_needed_is_refused(program):
    program(
        FRAME
        + """
given, upstream = problem()
results = [np.zeros((2, 4, 50, 24), np.float32), np.zeros((2, 4, 50), np.float32)]
for struct in ("api", "frame"):
    runtime = Runtime()
    made = frame(runtime, given, results)
    less = runtime.api if struct == "api" else made
    less.struct_size -= 8
    assert _foreign._handle(_foreign._attention, False, ctypes.pointer(made)) == 1
    message, code = runtime.errors[0]
    assert message.startswith("BackendUnavailableError: jaxlib: requires the XLA FFI") and code == 13
    less.struct_size += 8
    assert _foreign._handle(_foreign._attention, False, ctypes.pointer(made)) is None
assert np.array_equal(results[0], spattn.attention(*given, WINDOW))
"""
    )


def test_the_handler_tells_version_and_traits(program):
    """No traits: XLA keeps the call out of CUDA graphs. Other extensions are passed over."""
    program(
        FRAME
        + """
metadata = c_api.Metadata(struct_size=36, traits=99)
extension = c_api.MetadataExtension(metadata=ctypes.pointer(metadata))
extension.base.type = c_api.METADATA
base = ctypes.cast(ctypes.pointer(extension), ctypes.POINTER(c_api.Extension))
other = c_api.Extension(struct_size=24, type=7, next=base)
asks = c_api.CallFrame(struct_size=168, extensions=ctypes.pointer(other))
assert _foreign._handle(None, True, ctypes.pointer(asks)) is None
assert (metadata.version.major, metadata.version.minor, metadata.traits) == (0, 1, 0)
"""
    )


def test_structs_are_those_of_the_header(program):
    """Sizes, places and numbers as jaxlib's own header has them."""
    if shutil.which("c++") is None:
        pytest.skip("needs a C++ compiler, c++")
    program("""
import ctypes, subprocess
from spattn.jax import _c_api as c_api
names = {
    "Api": "Api", "Args": "Tensors", "Rets": "Tensors", "Attrs": "Attributes", "Buffer": "Tensor",
    "ByteSpan": "ByteSpan", "Extension_Base": "Extension", "Metadata_Extension": "MetadataExtension",
    "Error_Create_Args": "NewError", "Error_GetMessage_Args": "ErrorMessage", "Stream_Get_Args": "Stream",
    "DeviceOrdinal_Get_Args": "DeviceOrdinal", "DeviceMemory_Allocate_Args": "NewMemory",
    "DeviceMemory_Free_Args": "Memory", "Api_Version": "ApiVersion",
}
offsets = {
    "Api, XLA_FFI_Stream_Get": c_api.Api.get_stream, "Api, XLA_FFI_Error_Create": c_api.Api.create_error,
    "Api, XLA_FFI_Error_GetMessage": c_api.Api.get_message, "Api, XLA_FFI_Error_Destroy": c_api.Api.destroy_error,
    "Api, XLA_FFI_DeviceMemory_Allocate": c_api.Api.allocate, "Api, XLA_FFI_DeviceMemory_Free": c_api.Api.free,
    "Api, XLA_FFI_DeviceOrdinal_Get": c_api.Api.get_ordinal, "CallFrame, args": c_api.CallFrame.operands,
    "CallFrame, rets": c_api.CallFrame.results, "CallFrame, attrs": c_api.CallFrame.attributes,
    "Buffer, dims": c_api.Tensor.dims, "Buffer, data": c_api.Tensor.data, "Metadata, traits": c_api.Metadata.traits,
    "Error_Create_Args, errc": c_api.NewError.code, "DeviceMemory_Allocate_Args, data": c_api.NewMemory.data,
}
checks = [f"sizeof(XLA_FFI_{c}) == {ctypes.sizeof(getattr(c_api, own))}" for c, own in names.items()]
checks += [f"offsetof(XLA_FFI_{at}) == {own.offset}" for at, own in offsets.items()]
checks += ["XLA_FFI_API_MAJOR == 0", "XLA_FFI_AttrType_STRING == 4", "XLA_FFI_Extension_Metadata == 1",
           "XLA_FFI_DataType_F16 == 10", "XLA_FFI_DataType_F32 == 11", "XLA_FFI_DataType_F64 == 12",
           "XLA_FFI_DataType_BF16 == 16", "XLA_FFI_Error_Code_RESOURCE_EXHAUSTED == 8",
           "XLA_FFI_Error_Code_INVALID_ARGUMENT == 3", "XLA_FFI_Error_Code_INTERNAL == 13",
           "XLA_FFI_Error_Code_CANCELLED == 1"]
source = '#include "xla/ffi/api/c_api.h"\\n' + "".join(f'static_assert({x}, "");\\n' for x in checks)
def compiles(text):
    command = ["c++", "-fsyntax-only", "-xc++", "-I", jax.ffi.include_dir(), "-"]
    return subprocess.run(command, input=text, text=True, capture_output=True)
assert compiles(source).returncode == 0, compiles(source).stderr
assert compiles(source.replace("F16 == 10", "F16 == 9")).returncode
""")
