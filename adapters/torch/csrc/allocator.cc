#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "chorale/device/allocator.h"

namespace chorale_torch {
namespace {

// PyTorch also frees memory of which it knows the address only (raw_deallocate, in oneDNN's operations), so that what
// our allocator wants back lies before the data, in a cache line of its own.
constexpr size_t kHeaderBytes = 64;
static_assert(sizeof(chorale::memory::Block) <= kHeaderBytes);

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    const c10::Device cpu(c10::DeviceType::CPU);
    if (bytes == 0) return {nullptr, cpu};
    const chorale::memory::Block block = chorale::cpu_allocator().allocate(bytes + kHeaderBytes);
    std::memcpy(block.data, &block, sizeof(block));
    std::byte* data = block.data + kHeaderBytes;
    return {data, data, &release, cpu};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* data) {
    if (!data) return;
    chorale::memory::Block block;
    std::memcpy(&block, static_cast<std::byte*>(data) - kHeaderBytes, sizeof(block));
    chorale::cpu_allocator().deallocate(block);
  }
};

}  // namespace

void use_our_allocator() {
  static SharedAllocator allocator;
  auto& memory = chorale::cpu_allocator();
  if (memory.source().shared_descriptor() < 0) memory.set_source(chorale::shared_pages());
  c10::SetCPUAllocator(&allocator, 100);
}

}  // namespace chorale_torch
