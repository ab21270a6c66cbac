// The gradient of a piece of a compiled stretch.
#pragma once

#include <memory>
#include <vector>

#include "chorale/api/segment.h"
#include "chorale/autograd/new_node.h"

namespace chorale::compiled {

// The gradient of a piece: one node for all of it.
struct PieceBackward final : autograd::CustomBackward {
  std::shared_ptr<const Segment> segment;
  size_t piece = 0;
  std::vector<Tensor> saved;
  std::vector<uint32_t> versions;
  std::vector<int64_t> sizes;  // that the forward pass found, by symbol

  void note_versions() {
    for (const Tensor& value : saved) versions.push_back(value.storage()->version());
  }
  const char* name() const override { return "compiled"; }
  void release() override { saved.clear(); }
  Tensors apply(autograd::Node&, std::span<const Tensor> dout, op::InputSet) override;
};

// For each exit of a piece, the tangents that its gradient depends on.
std::vector<std::vector<bool>> reached_by(const Segment::Piece& piece);

}  // namespace chorale::compiled
