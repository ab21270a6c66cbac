#include "chorale/kernel/cpu/dnnl/primitive.h"

#include <omp.h>

#include "chorale/base/error.h"
#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/dnnl/runtime.h"
#include "chorale/kernel/cpu/support/scratch.h"

namespace chorale::kernel::cpu::dnnl {

const ::dnnl::engine& engine() {
  static const ::dnnl::engine instance = [] {
    initialize();
    return ::dnnl::engine(::dnnl::engine::kind::cpu, 0);
  }();
  return instance;
}

::dnnl::memory::data_type type_of(DType dtype) {
  CHORALE_INVARIANT(dtype == DType::kF32 || dtype == DType::kBF16, "oneDNN is given ", dtype);
  return dtype == DType::kF32 ? ::dnnl::memory::data_type::f32 : ::dnnl::memory::data_type::bf16;
}

namespace {

// Primitives run in order, and nothing is left running when a call returns.
dnnl_stream_t stream() {
  thread_local const ::dnnl::stream instance(engine());
  return instance.get();
}

}  // namespace

Primitive::Primitive(const ::dnnl::primitive& primitive, const ::dnnl::memory::desc& scratchpad,
                     std::initializer_list<Argument> arguments)
    : primitive_(primitive), scratch_bytes_(scratchpad.get_size()) {
  const auto add = [&](int kind, const ::dnnl::memory::desc& desc) {
    memories_.emplace_back(desc, engine(), static_cast<void*>(DNNL_MEMORY_NONE));
    arguments_.push_back({kind, memories_.back().get()});
  };
  for (const Argument& argument : arguments) add(argument.kind, argument.desc);
  add(DNNL_ARG_SCRATCHPAD, scratchpad);
}

void Primitive::run(std::initializer_list<const void*> addresses) {
  CHORALE_INVARIANT(addresses.size() + 1 == arguments_.size(), "oneDNN: ", addresses.size(), " addresses for ",
                    arguments_.size(), " arguments");
  const Scratch scratch(scratch_bytes_);
  auto argument = arguments_.begin();
  const auto set = [&](void* address) {
    const dnnl_status_t status = dnnl_memory_set_data_handle((argument++)->memory, address);
    CHORALE_INVARIANT(status == dnnl_success, "oneDNN refused an address: status ", static_cast<int>(status));
  };
  for (const void* address : addresses) set(const_cast<void*>(address));
  set(scratch.as<void>());
  const dnnl_status_t status =
      dnnl_primitive_execute(primitive_.get(), stream(), static_cast<int>(arguments_.size()), arguments_.data());
  CHORALE_INVARIANT(status == dnnl_success, "oneDNN failed: status ", static_cast<int>(status));
}

Key::Key(std::initializer_list<int64_t> words) {
  size_t used = 0;
  const auto add = [&](int64_t word) {
    words_.at(used++) = word;
    // Multiply and fold: every bit of the word reaches the low bits, which choose the bucket.
    const auto product = static_cast<unsigned __int128>(hash_ ^ static_cast<uint64_t>(word)) * 0x9e3779b97f4a7c15u;
    hash_ = static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64) ^ used;
  };
  add(BuildingThreads::count());
  for (const int64_t word : words) add(word);
}

int BuildingThreads::count() { return omp_in_parallel() ? 1 : thread_count(); }
BuildingThreads::BuildingThreads() : before_(thread_count()) { set_thread_count(count()); }
BuildingThreads::~BuildingThreads() { set_thread_count(before_); }

CacheCounts& cache_counts() {
  thread_local CacheCounts counts;
  return counts;
}

}  // namespace chorale::kernel::cpu::dnnl
