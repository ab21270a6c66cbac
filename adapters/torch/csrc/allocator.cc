#include "allocator.h"

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>

#include <cstring>

#include "chorale/device/allocator.h"

namespace chorale_torch {
namespace {

class SharedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) return {nullptr, c10::Device(c10::DeviceType::CPU)};
    auto* block = new chorale::Block(chorale::cpu_allocator().allocate(bytes));
    return {block->data, block, &release, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { std::memcpy(to, from, bytes); }

 private:
  static void release(void* context) {
    const auto* block = static_cast<const chorale::Block*>(context);
    chorale::cpu_allocator().deallocate(*block);
    delete block;
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
