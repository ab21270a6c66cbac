#include "chorale/train/tasks.h"

namespace chorale::train {

std::vector<std::unique_ptr<TaskKind>> task_kinds() {
  std::vector<std::unique_ptr<TaskKind>> kinds;
  kinds.push_back(fashion_kind());
  kinds.push_back(gpt_kind());
  kinds.push_back(bert_kind());
  return kinds;
}

}  // namespace chorale::train
