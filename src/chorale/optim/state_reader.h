// Reading what a state_dict() gave, with one error for all that does not fit.
#pragma once

#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "chorale/tensor/tensor.h"

namespace chorale::optim {

class StateReader {
 public:
  // `reader` is for messages. The state must outlive it.
  StateReader(const char* reader, const std::vector<std::pair<std::string, Tensor>>& state);

  // The number there; 0 and a note when there is none.
  double number(const std::string& key);
  int64_t whole_number(const std::string& key) { return static_cast<int64_t>(number(key)); }
  // The tensor there; undefined and a note when there is none. InvalidArgument when its shape is another.
  Tensor tensor(const std::string& key, const Shape& sizes);
  // InvalidArgument when something was asked for in vain, or is there and was not asked for.
  void finish() const;

 private:
  const char* reader_;
  std::map<std::string, Tensor> state_;
  std::vector<std::string> missing_;
  std::set<std::string> wanted_;
};

}  // namespace chorale::optim
