// A Builder that stands above the others for the length of a scope and changes what is called, as autocast does.
//
// Two things must not depend on when that scope ends. Gradient rules run below it: what they call follows from what was
// recorded, not from where backward happens to be called. And a part of the forward pass that is run again during
// backward runs under a copy of it.
#pragma once

#include <memory>

#include "chorale/op/builder.h"

namespace chorale::op {

class ScopedBuilder : public Builder {
 public:
  virtual ~ScopedBuilder() = default;
  // The stack without it.
  virtual Builder& below() const = 0;
  // One that does the same, independent of this one's lifetime and thread.
  virtual std::shared_ptr<ScopedBuilder> copy() const = 0;
};

// What the thread's calls go to, if that is such a Builder; otherwise null.
inline ScopedBuilder* current_scoped_builder() { return dynamic_cast<ScopedBuilder*>(&current_builder()); }

// The thread's stack without it.
inline Builder& builder_for_gradients() {
  const ScopedBuilder* scoped = current_scoped_builder();
  return scoped ? scoped->below() : current_builder();
}

}  // namespace chorale::op
