// A second device for machines without a GPU: `second:0`, `second:1`. Its memory is main memory that the host cannot
// touch (pages without access; kernels reach it through a second mapping), its operators are the CPU's, run without a copy.
// What would be an error, a wait or a copy on a GPU raises or is counted here.
#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <ATen/autocast_mode.h>
#include <torch/library.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <atomic>
#include <mutex>
#include <set>
#include <unordered_map>

namespace {
constexpr auto KEY = c10::DispatchKey::PrivateUse1;
constexpr auto TYPE = c10::DeviceType::PrivateUse1;
constexpr int DEVICES = 2;
constexpr size_t MIB = 1 << 20;
constexpr size_t RANGE = 1ull << 37;  // of addresses; pages come as they are used

enum Count { H2D, H2D_BYTES, H2D_PINNED, D2H, D2H_BYTES, D2D, SYNC, KERNELS, ALLOCATIONS, ALLOCATED, PEAK, NUM };
std::atomic<int64_t> counts[NUM];
std::atomic<int64_t> limit{(int64_t)RANGE};  // of bytes, of both devices together
thread_local int current = 0;
void count(Count what, int64_t by = 1) { counts[what] += by; }

// ---- memory ----------------------------------------------------------------------------------------------------------

struct Memory {
  char *sealed, *open;
  int file;
  size_t next = 4096;
  std::mutex lock;
  std::unordered_map<size_t, std::vector<size_t>> free_;  // by size: a power of two, from a mebibyte on a multiple of it
  std::unordered_map<size_t, size_t> size_;
  Memory() {
    file = memfd_create("second", 0);
    TORCH_CHECK(file >= 0 && ftruncate(file, RANGE) == 0, "second: no memory file");
    sealed = (char*)mmap(nullptr, RANGE, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
    open = (char*)mmap(nullptr, RANGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    TORCH_CHECK(sealed != MAP_FAILED && open != MAP_FAILED, "second: no addresses");
  }
  void* take(size_t bytes) {
    size_t size = 512;
    while (size < bytes && size < MIB) size <<= 1;
    if (size < bytes) size = (bytes + MIB - 1) / MIB * MIB;
    std::lock_guard<std::mutex> guard(lock);
    TORCH_CHECK_WITH(OutOfMemoryError, counts[ALLOCATED] + (int64_t)size <= limit, "second: out of memory: ", size, " bytes beside ", counts[ALLOCATED].load());
    auto& list = free_[size];
    size_t at;
    if (list.empty()) { at = next; next += size; TORCH_CHECK(next < RANGE, "second: out of memory"); }
    else { at = list.back(); list.pop_back(); }
    size_[at] = size;
    count(ALLOCATIONS);
    int64_t now = counts[ALLOCATED] += size;
    if (now > counts[PEAK]) counts[PEAK] = now;
    return sealed + at;
  }
  void give(void* pointer) {
    size_t at = (char*)pointer - sealed;
    std::lock_guard<std::mutex> guard(lock);
    size_t size = size_[at];
    counts[ALLOCATED] -= size;
    if (size >= 1 << 16) fallocate(file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, at, size);
    free_[size].push_back(at);
  }
  char* opened(const void* pointer) { return open + ((char*)pointer - sealed); }
};
Memory& memory() { static Memory* one = new Memory; return *one; }

struct Allocator final : at::Allocator {
  at::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? memory().take(bytes) : nullptr;
    return {data, data, &give, c10::Device(TYPE, current)};
  }
  static void give(void* data) { if (data) memory().give(data); }
  at::DeleterFnPtr raw_deleter() const override { return &give; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(memory().opened(to), memory().opened(from), bytes);
  }
} allocator;
REGISTER_ALLOCATOR(TYPE, &allocator);

// ---- the device ------------------------------------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  static constexpr c10::DeviceType static_type = TYPE;
  c10::DeviceType type() const override { return TYPE; }
  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device old(TYPE, current); setDevice(device); return old;
  }
  c10::Device getDevice() const override { return c10::Device(TYPE, current); }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < DEVICES, "second: there is no device ", int(device.index()));
    if (device.index() >= 0) current = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override { if (device.index() >= 0) current = device.index(); }
  c10::Stream getStream(c10::Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return getStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getStream(device); }
  c10::Stream getNewStream(c10::Device device, int) const override { return getStream(device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  c10::DeviceIndex deviceCount() const noexcept override { return DEVICES; }
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override { count(SYNC); }
  void synchronizeEvent(void*) const override { count(SYNC); }
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
  double elapsedTime(void*, void*, const c10::DeviceIndex) const override { return 0.0; }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index) : CPUGeneratorImpl(c10::default_rng_seed_val) {
    device_ = c10::Device(TYPE, index);
    key_set_ = c10::DispatchKeySet(KEY);
  }
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  at::Generator host = at::make_generator<at::CPUGeneratorImpl>();  // whose numbers they are
};
at::Generator& generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < DEVICES; i++) made.push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all[index < 0 ? current : index];
}
struct Hooks final : at::PrivateUse1HooksInterface {
  const at::Generator& getDefaultGenerator(c10::DeviceIndex index) const override { return generator(index); }
  at::Generator getNewGenerator(c10::DeviceIndex index) const override { return at::make_generator<Generator>(index); }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool isPinnedPtr(const void*) const override { return false; }
  c10::Device getDeviceFromPtr(void*) const override { return c10::Device(TYPE, current); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    auto data = allocator.allocate(bytes);
    if (bytes && storage.nbytes())
      std::memcpy(memory().opened(data.get()), memory().opened(storage.data()), std::min(bytes, storage.nbytes()));
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};
const bool hooked = (at::RegisterPrivateUse1HooksInterface(new Hooks), true);

// ---- operators -------------------------------------------------------------------------------------------------------

bool is_ours(const at::Tensor& tensor) { return tensor.defined() && tensor.device().type() == TYPE; }

/// The same elements as a CPU tensor over the open mapping.
at::Tensor opened_tensor(const at::Tensor& tensor) {
  auto* from = tensor.storage().unsafeGetStorageImpl();
  void* data = from->data() ? memory().opened(from->data()) : nullptr;
  auto* kept = new c10::Storage(tensor.storage());
  at::DataPtr pointer(data, kept, [](void* it) { delete (c10::Storage*)it; }, c10::kCPU);
  c10::Storage storage(c10::Storage::use_byte_size_t(), from->nbytes(), std::move(pointer), at::getCPUAllocator(), true);
  auto made = at::detail::make_tensor<at::TensorImpl>(std::move(storage), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
  made.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
  if (tensor.is_conj()) made.unsafeGetTensorImpl()->_set_conj(true);
  if (tensor.is_neg()) made.unsafeGetTensorImpl()->_set_neg(true);
  return made;
}

at::Tensor empty_on(c10::Device device, c10::IntArrayRef sizes, c10::IntArrayRef strides, at::ScalarType dtype) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(KEY), dtype);
}

const std::set<std::string> WAITS = {  // on a GPU the host must know a number before it can go on
    "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive",
    "aten::bincount", "aten::repeat_interleave", "aten::equal", "aten::segment_reduce", "aten::is_nonzero"};
const std::set<std::string> TAKES_HOST_INDICES = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
                                                 "aten::_unsafe_index"};
std::mutex names_lock;
std::unordered_map<std::string, int64_t> names;

struct Call {
  c10::Device device{TYPE, (c10::DeviceIndex)-1};
  std::string name;
  std::unordered_map<void*, at::Tensor> owners;  // by the open address of a storage
  std::vector<std::pair<at::Tensor, at::Tensor>> pairs;  // ours, its alias
  bool host_indices = false;

  at::Tensor lower(const at::Tensor& tensor) {
    if (!tensor.defined()) return tensor;
    if (!is_ours(tensor)) {
      if (tensor.dim() > 0 && tensor.device().is_cpu()) {
        TORCH_CHECK(TAKES_HOST_INDICES.count(name), name, ": Expected all tensors to be on the same device, but found ",
                    tensor.device(), " (", tensor.sizes(), " ", tensor.dtype(), ") beside ", c10::Device(TYPE, current));
        host_indices = true;
      }
      return tensor;
    }
    TORCH_CHECK(device.index() < 0 || device == tensor.device() || tensor.dim() == 0, name,
                ": Expected all tensors to be on the same device, but found ", device, " and ", tensor.device());
    if (device.index() < 0) device = tensor.device();
    auto made = opened_tensor(tensor);
    owners[made.storage().unsafeGetStorageImpl()->mutable_data()] = tensor;
    pairs.emplace_back(tensor, made);
    return made;
  }
  at::Tensor raise_(const at::Tensor& tensor) {
    if (!tensor.defined() || !tensor.device().is_cpu()) return tensor;
    for (auto& [ours, made] : pairs)  // written in place
      if (made.is_same(tensor)) return ours;
    auto owner = owners.find(tensor.storage().unsafeGetStorageImpl()->mutable_data());
    if (owner != owners.end() && tensor.storage().nbytes()) {  // a view
      auto view = at::detail::make_tensor<at::TensorImpl>(c10::TensorImpl::VIEW, c10::Storage(owner->second.storage()),
                                                         owner->second.key_set(), tensor.dtype());
      view.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
      view.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
      return view;
    }
    auto made = empty_on(device, tensor.sizes(), tensor.strides(), tensor.scalar_type());
    opened_tensor(made).copy_(tensor);
    return made;
  }
  void settle() {  // outputs that were given and have another size now
    for (auto& [ours, made] : pairs) {
      if (ours.sizes() == made.sizes()) continue;
      if (made.storage().nbytes() > ours.storage().nbytes()) {
        auto fresh = empty_on(device, made.sizes(), made.strides(), made.scalar_type());
        ours.unsafeGetTensorImpl()->set_storage_keep_dtype(fresh.storage());
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
        opened_tensor(ours).copy_(made);
      } else {
        ours.unsafeGetTensorImpl()->set_sizes_and_strides(made.sizes(), made.strides());
      }
    }
  }
};

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num = schema.arguments().size(), begin = stack->size() - num;
  Call call;
  call.name = schema.name();
  count(KERNELS);
  { std::lock_guard<std::mutex> guard(names_lock); names[call.name]++; }
  c10::optional<c10::Device> asked;
  for (size_t i = 0; i < num; i++) {
    c10::IValue& value = (*stack)[begin + i];
    if (value.isTensor()) value = call.lower(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(call.lower(each));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<c10::optional<at::Tensor>> list;
      for (const c10::IValue& each : value.toListRef())
        list.push_back(each.isNone() ? c10::optional<at::Tensor>() : call.lower(each.toTensor()));
      value = list;
    } else if (value.isDevice()) { asked = value.toDevice(); value = c10::Device(c10::kCPU); }
    else if (value.isGenerator()) {
      auto given = value.toGenerator();
      TORCH_CHECK(given.device().type() == TYPE, call.name, ": Expected a '", c10::Device(TYPE, 0), "' generator but found '", given.device(), "'");
      value = static_cast<Generator*>(given.unsafeGetGeneratorImpl())->host;
    }
  }
  if (asked && call.device.index() < 0) call.device = *asked;
  if (call.device.index() < 0) call.device = c10::Device(TYPE, current);
  if (call.host_indices) count(H2D);
  bool waits = WAITS.count(call.name);
  if (TAKES_HOST_INDICES.count(call.name))
    for (auto& [ours, made] : call.pairs) waits |= ours.scalar_type() == at::kBool && call.pairs[0].first.scalar_type() != at::kBool;
  if (waits) count(SYNC);
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  call.settle();
  const size_t first = stack->size() - schema.returns().size();
  for (size_t i = first; i < stack->size(); i++) {
    c10::IValue& value = (*stack)[i];
    if (value.isTensor()) value = call.raise_(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> list;
      for (const at::Tensor& each : value.toTensorVector()) list.push_back(call.raise_(each));
      value = list;
    }
  }
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool non_blocking) {
  const bool ours = is_ours(from), theirs = is_ours(to);
  if (ours && theirs) count(D2D);
  else {
    count(ours ? D2H : H2D);
    count(ours ? D2H_BYTES : H2D_BYTES, to.nbytes());
    if (ours) count(SYNC);
  }
  (theirs ? opened_tensor(to) : to).copy_(ours ? opened_tensor(from) : from);
  return to;
}
at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (from.sizes() != to.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}
at::Scalar local_scalar_dense(const at::Tensor& tensor) { count(SYNC); return opened_tensor(tensor).item(); }
at::Tensor empty(c10::IntArrayRef sizes, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>, c10::optional<c10::Device> device,
                 c10::optional<bool>, c10::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(sizes, &allocator, c10::DispatchKeySet(KEY), at::dtype_or_default(dtype), format);
}
at::Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides, c10::optional<at::ScalarType> dtype, c10::optional<at::Layout>,
                         c10::optional<c10::Device> device, c10::optional<bool>) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(sizes, strides, &allocator, c10::DispatchKeySet(KEY), at::dtype_or_default(dtype));
}
const at::Tensor& resize_(const at::Tensor& self, c10::SymIntArrayRef size, c10::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, C10_AS_INTARRAYREF_SLOW(size), format);
}
at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(std::move(source));
  self.unsafeGetTensorImpl()->set_storage_offset(offset);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides.empty() && !sizes.empty() ? c10::IntArrayRef(c10::contiguous_strides(sizes)) : strides);
  return self;
}
at::Tensor reshape_alias(const at::Tensor& self, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  return at::native::as_strided_tensorimpl(self, sizes, strides, self.storage_offset());
}
at::Tensor view(const at::Tensor& self, c10::SymIntArrayRef size) { return at::native::view(self, C10_AS_INTARRAYREF_SLOW(size)); }
void record_stream(at::Tensor&, c10::Stream) {}
bool is_pinned(const at::Tensor&, c10::optional<c10::Device>) { return false; }

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
  AT_FORALL_FP32(FULL)
}
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
  m.impl("_reshape_alias", &reshape_alias);
  m.impl("view", &view);
  m.impl("resize_", &resize_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("set_.source_Tensor", TORCH_FN(at::native::set_tensor_));
  m.impl("set_.source_Storage", TORCH_FN(at::native::set_));
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
}
}  // namespace

extern "C" {
void second_set_limit(long bytes) { limit = bytes ? bytes : (int64_t)RANGE; }
long second_limit() { return limit; }
long second_count(int what) { return counts[what]; }
void second_forget() { for (int i = 0; i < NUM; i++) if (i != ALLOCATED && i != PEAK) counts[i] = 0; counts[PEAK] = counts[ALLOCATED].load(); std::lock_guard<std::mutex> g(names_lock); names.clear(); }
void second_reset_peak() { counts[PEAK] = counts[ALLOCATED].load(); }
void second_wait() { count(SYNC); }
int second_current() { return current; }
void second_set(int device) { current = device; }
void* second_opened(void* pointer) { return memory().opened(pointer); }
int second_names(char* out, int size) {
  std::lock_guard<std::mutex> guard(names_lock);
  std::string all;
  for (auto& [name, times] : names) all += name + " " + std::to_string(times) + "\n";
  snprintf(out, size, "%s", all.c_str());
  return all.size();
}
}
