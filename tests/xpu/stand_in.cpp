// Copyright (c) The zero_topo authors. SPDX-License-Identifier: Apache-2.0
// An XPU without a GPU: tensors of device "xpu" in host memory, for a PyTorch that was built for CPUs alone.
//
// PyTorch has the device type, its dispatch key and its hooks in every build, and nothing behind them. Here they get an
// allocator, streams and events that only have numbers, page-locked memory that is ordinary memory, and kernels: every
// operation copies its arguments to the CPU, runs there and copies results back. Views, copies and allocation are own
// kernels, as on a GPU: a view that ran on the CPU would be a copy, and what is written into it would be lost. Load it before PyTorch first asks for an accelerator: it keeps the answer.
#include <ATen/ATen.h>
#include <ATen/detail/XPUHooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <atomic>
#include <cstdlib>
#include <mutex>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;

constexpr auto XPU = c10::DeviceType::XPU;

DeviceIndex count() {
  const char* told = std::getenv("STAND_IN_XPUS");
  return static_cast<DeviceIndex>(told ? std::atoi(told) : 1);
}

thread_local DeviceIndex current_device = 0;
thread_local c10::StreamId current_stream = 0;
std::atomic<c10::StreamId> streams{0};
std::atomic<intptr_t> events{0};

struct Memory final : c10::Allocator {
  Device device;
  explicit Memory(c10::DeviceType type) : device(type, type == XPU ? 0 : -1) {}
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? std::malloc(bytes) : nullptr;
    Device where = device.type() == XPU ? Device(XPU, current_device) : device;
    return {data, data, &std::free, where};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &std::free;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

std::mutex locked_mutex;
std::set<const void*> locked;

// Page-locked memory: ordinary memory whose addresses are kept.
struct Locked final : c10::Allocator {
  static void release(void* data) {
    std::lock_guard<std::mutex> lock(locked_mutex);
    locked.erase(data);
    std::free(data);
  }
  c10::DataPtr allocate(size_t bytes) override {
    void* data = std::malloc(bytes ? bytes : 1);
    std::lock_guard<std::mutex> lock(locked_mutex);
    locked.insert(data);
    return {data, data, &release, Device(c10::DeviceType::CPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Memory memory(XPU);
Locked locked_memory;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return XPU;
  }
  Device exchangeDevice(Device device) const override {
    Device before(XPU, current_device);
    setDevice(device);
    return before;
  }
  Device getDevice() const override {
    return {XPU, current_device};
  }
  void setDevice(Device device) const override {
    TORCH_CHECK(device.type() == XPU && device.index() < count(), "there is no ", device);
    uncheckedSetDevice(device);
  }
  void uncheckedSetDevice(Device device) const noexcept override {
    if (device.has_index()) {
      current_device = device.index();
    }
  }
  Stream stream(c10::StreamId id, Device device) const {
    return Stream(Stream::UNSAFE, Device(XPU, device.has_index() ? device.index() : current_device), id);
  }
  Stream getStream(Device device) const override {
    return stream(current_stream, device);
  }
  Stream getDefaultStream(Device device) const override {
    return stream(0, device);
  }
  Stream getNewStream(Device device, int) const override {
    return stream(++streams, device);
  }
  Stream getStreamFromGlobalPool(Device device, bool) const override {
    return stream(++streams, device);
  }
  Stream exchangeStream(Stream other) const override {
    Stream before = getStream(other.device());
    current_stream = other.id();
    return before;
  }
  void record(void** event, const Stream&, const DeviceIndex, const c10::EventFlag) const override {
    *event = reinterpret_cast<void*>(++events);
  }
  void block(void* event, const Stream&) const override {
    TORCH_CHECK(event, "a stream waits for an event that was never recorded");
  }
  bool queryEvent(void*) const override {
    return true;
  }
  bool queryStream(const Stream&) const override {
    return true;
  }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  double elapsedTime(void*, void*, const DeviceIndex) const override {
    return 0;
  }
  DeviceIndex deviceCount() const noexcept override {
    return count();
  }
};
C10_REGISTER_GUARD_IMPL(XPU, Guard);

struct XPUHooks final : at::XPUHooksInterface {
  void init() const override {}
  bool isBuilt() const override {
    return true;
  }
  bool isAvailable() const override {
    return true;
  }
  bool hasXPU() const override {
    return true;
  }
  bool hasPrimaryContext(DeviceIndex) const override {
    return true;
  }
  DeviceIndex getNumGPUs() const override {
    return count();
  }
  DeviceIndex deviceCount() const override {
    return count();
  }
  DeviceIndex current_device() const override {
    return ::current_device;
  }
  DeviceIndex getCurrentDevice() const override {
    return ::current_device;
  }
  void setCurrentDevice(DeviceIndex device) const override {
    Guard().setDevice({XPU, device});
  }
  DeviceIndex exchangeDevice(DeviceIndex device) const override {
    return Guard().exchangeDevice({XPU, device}).index();
  }
  DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
    return device < 0 ? ::current_device : exchangeDevice(device);
  }
  void deviceSynchronize(DeviceIndex) const override {}
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &locked_memory;
  }
  bool isPinnedPtr(const void* data) const override {
    std::lock_guard<std::mutex> lock(locked_mutex);
    return locked.count(data) != 0;
  }
  Device getDeviceFromPtr(void*) const override {
    return {XPU, ::current_device};
  }
};

// The same memory as a tensor of the CPU.
Tensor on_host(const Tensor& tensor) {
  if (tensor.device().type() != XPU) {
    return tensor;
  }
  auto options = tensor.options().device(c10::DeviceType::CPU);
  return at::from_blob(tensor.mutable_data_ptr(), tensor.sizes(), tensor.strides(), options);
}

Tensor& copy(Tensor& self, const Tensor& source, bool) {
  Tensor to = on_host(self);
  to.copy_(on_host(source));
  return self;
}

Tensor copy_from(const Tensor& source, const Tensor& self, bool) {
  on_host(self).copy_(on_host(source));
  return self;
}

Tensor copy_from_and_resize(const Tensor& source, const Tensor& self) {
  self.resize_(source.sizes());
  return copy_from(source, self, false);
}

constexpr c10::DispatchKeySet keys(c10::DispatchKey::XPU);

at::ScalarType or_default(std::optional<at::ScalarType> dtype) {
  return dtype.value_or(c10::get_default_dtype_as_scalartype());
}

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard there(device);
  return at::detail::empty_generic(sizes, &memory, keys, or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  c10::OptionalDeviceGuard there(device);
  return at::detail::empty_strided_generic(sizes, strides, &memory, keys, or_default(dtype));
}

at::Scalar value(const Tensor& tensor) {
  return on_host(tensor).item();
}

// A tensor that has the sizes keeps its strides: results of the CPU are copied into views of larger tensors.
const Tensor& resize(const Tensor& self, c10::IntArrayRef sizes, std::optional<at::MemoryFormat> format) {
  if (self.sizes() == sizes) {
    return self;
  }
  auto* own = self.unsafeGetTensorImpl();
  own->set_sizes_contiguous(sizes);
  size_t bytes = (own->storage_offset() + own->numel()) * own->itemsize();
  c10::StorageImpl* storage = own->unsafe_storage().unsafeGetStorageImpl();
  if (bytes > storage->nbytes()) {
    c10::DataPtr more = memory.allocate(bytes);
    if (storage->data()) {
      std::memcpy(more.get(), storage->data(), storage->nbytes());
    }
    storage->set_data_ptr_noswap(std::move(more));
    storage->set_nbytes(bytes);
  }
  return self;
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides) {
  auto* own = self.unsafeGetTensorImpl();
  own->set_storage_keep_dtype(std::move(source));
  own->set_storage_offset(offset);
  if (strides.empty() && !sizes.empty()) {
    own->set_sizes_contiguous(sizes);
  } else {
    own->set_sizes_and_strides(sizes, strides);
  }
  return self;
}

Tensor& set_whole(Tensor& self, at::Storage source) {
  int64_t numel = static_cast<int64_t>(source.nbytes()) / self.element_size();
  return set_storage(self, std::move(source), 0, {numel}, {});
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}

// Memory is freed at once: whoever still uses it is found by the ordering checker, not here.
void record_stream(Tensor&, Stream) {}

// A PyTorch for CPUs has no collectives of XPUs. Those of the CPU give the group its tensors as they are; copies of them
// would keep what it receives, because the collectives' schemas do not say which tensors they write.
void elsewhere(const c10::OperatorHandle& operation, c10::DispatchKeySet, torch::jit::Stack* stack) {
  if (operation.operator_name().getNamespace() == "c10d") {
    operation.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
    return;
  }
  at::native::cpu_fallback(operation, stack);
}

}  // namespace

namespace at {
REGISTER_XPU_HOOKS(XPUHooks);
}

TORCH_LIBRARY_IMPL(_, XPU, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&elsewhere>());
}

TORCH_LIBRARY_IMPL(aten, XPU, library) {
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  library.impl("_local_scalar_dense", &value);
  library.impl("_reshape_alias", &at::native::_reshape_alias);
  library.impl("as_strided", &at::native::as_strided_tensorimpl);
  library.impl("copy_", &copy);
  library.impl("empty.memory_format", &empty);
  library.impl("empty_strided", &empty_strided);
  library.impl("record_stream", &record_stream);
  library.impl("resize_", &resize);
  library.impl("set_.source_Storage", &set_whole);
  library.impl("set_.source_Storage_storage_offset", &set_storage);
  library.impl("set_.source_Tensor", &set_tensor);
  library.impl("unfold", &at::native::unfold);
  library.impl("view", &at::native::view);
  library.impl("view_as_complex", &at::native::view_as_complex);
  library.impl("view_as_real", &at::native::view_as_real);
}

// A library that was linked in, not one that is loaded after a first tensor, registers its allocator so.
static const bool registered = [] {
  c10::SetAllocator(XPU, &memory);
  return true;
}();
