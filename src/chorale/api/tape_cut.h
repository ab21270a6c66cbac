// Finds where a part of autograd's tape begins and ends: the nodes that one recording made, in one or several pieces.
#pragma once

#include <vector>

#include "chorale/autograd/node.h"

namespace chorale::compiled {

// The tape of one piece: which results of its nodes are asked for gradients from outside of it, and where gradients
// leave it.
struct TapePiece {
  struct Exit {
    autograd::Edge edge;
    size_t piece = SIZE_MAX, root = SIZE_MAX;  // where it leads to an earlier piece: which of its roots
  };
  // An edge of a node inside that leaves the piece.
  struct Crossing {
    autograd::Node* node;
    size_t edge, exit;
  };
  std::vector<autograd::Edge> roots;
  std::vector<Exit> exits;
  std::vector<Crossing> crossings;
};

struct TapeCut {
  std::vector<TapePiece> pieces;                 // in the order of the forward pass
  std::vector<std::pair<size_t, size_t>> place;  // of each result: its piece, and its place among the piece's roots
  bool has_hooks = false;                        // somebody wants to see gradients inside
};

// `ends[k]`: the time (the number of a node) at which piece k ended; nodes up to `begin` are older than the recording.
TapeCut cut_tape(const std::vector<autograd::Edge>& results, uint64_t begin, const std::vector<uint64_t>& ends);

// Lets a piece end where it ends, for as long as this lives: its exits lead to leaves of its own, so that a backward
// goes no further.
class ShutPiece {
 public:
  explicit ShutPiece(const TapePiece& piece);
  ~ShutPiece();
  ShutPiece(const ShutPiece&) = delete;
  ShutPiece& operator=(const ShutPiece&) = delete;
  const Tensor& leaf(size_t exit) const { return leaves_[exit]; }

 private:
  const TapePiece& piece_;
  std::vector<Tensor> leaves_;  // by exit
};

}  // namespace chorale::compiled
