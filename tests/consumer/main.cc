// A step of data-parallel training with a group of however many ranks there are.
#include <iostream>

#include "chorale/chorale.h"

using namespace chorale;

// Words of inner layers stay free for users: each of these would be ambiguous if `using namespace chorale` brought it.
struct Block {};
struct Pool {};
struct Arena {};
struct Field {};
struct Location {};
struct ForkMark {};
struct PointerMap {};
struct RefCounted {};
struct Intrusive {};
struct FunctionRef {};
struct TypeTag {};
struct ArenaSource {};
struct ThreadCache {};
struct AllocatorState {};
struct FieldKind {};
struct FieldValue {};
struct AttrsType {};
struct Reach {};
struct TensorImpl {};
struct AutogradSlot {};
struct LeafHookWithoutSink {};
struct EventState {};
struct philox {};
struct random_word {};
constexpr int kPageBytes = 1, kArenaBytes = 2, kBlockAlignment = 3, kLargestSmallBytes = 4;
template <class... Words>
static void use_own_words(Words...) {}

int main(int argc, char**) {
  use_own_words(Block{}, Pool{}, Arena{}, Field{}, Location{}, ForkMark{}, PointerMap{}, RefCounted{}, Intrusive{},
                FunctionRef{}, TypeTag{}, ArenaSource{}, ThreadCache{}, AllocatorState{}, FieldKind{}, FieldValue{},
                AttrsType{}, Reach{}, TensorImpl{}, AutogradSlot{}, LeafHookWithoutSink{}, EventState{}, philox{},
                random_word{}, kPageBytes, kArenaBytes, kBlockAlignment, kLargestSmallBytes);
  comm::World world;
  if (argc > 1) world.init();  // with an argument: a launcher has started this
  const Tensor w = set_requires_grad(ones({3}));
  backward(sum(square(w)));
  const Tensor dw = gradient(w);
  if (world.is_initialized()) world.group().all_reduce(dw).wait();
  std::cout << "gradient " << dw << "\n";
}
