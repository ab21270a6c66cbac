#include "chorale/op/group_tensor.h"

#include "chorale/base/error.h"
#include "chorale/op/need_defined.h"

namespace chorale {
namespace {

// Beyond those that the tensor layer knows by name; 17 is that of defs/collective.cc.
constexpr auto kGroupKind = static_cast<TensorExtension::Kind>(16);

struct GroupExtension final : TensorExtension {
  explicit GroupExtension(std::shared_ptr<const comm::Group> which)
      : TensorExtension(kGroupKind), group(std::move(which)) {}
  std::unique_ptr<TensorExtension> copy() const override { return std::make_unique<GroupExtension>(group); }
  std::string why_no_bytes(const Tensor&) const override { return "a group has no elements"; }
  std::shared_ptr<const comm::Group> group;
};

}  // namespace

Tensor group_tensor(std::shared_ptr<const comm::Group> group) {
  CHORALE_CHECK(group && group->is_member(), "[group_tensor] this rank is not in the group, so it has no part in what ",
                "the group does");
  Tensor tensor = Tensor::from<int64_t>({group->rank(), group->size()}, {2});
  tensor.impl()->extension = std::make_unique<GroupExtension>(std::move(group));
  return tensor;
}
Tensor group_tensor(const comm::Group& group) {
  return group_tensor(std::shared_ptr<const comm::Group>(std::shared_ptr<void>(), &group));
}

const comm::Group* group_of(const Tensor& tensor) {
  op::need_defined("collective", "group", tensor);
  const TensorExtension* known = tensor.extension();
  if (known && known->kind == kGroupKind) {
    const comm::Group* group = static_cast<const GroupExtension*>(known)->group.get();
    return group->size() > 1 ? group : nullptr;
  }
  CHORALE_CHECK(!known && tensor.dtype() == DType::kI64 && tensor.elems() == 2 && tensor.to_vector<int64_t>()[1] == 1,
                "[collective] the group must be what group_tensor() made (a copy of that is no group), found a tensor ",
                "of ", tensor.dtype(), " ", tensor.sizes());
  return nullptr;
}

bool is_group(const Tensor& tensor) {
  return tensor.defined() && tensor.extension() && tensor.extension()->kind == kGroupKind;
}

}  // namespace chorale
