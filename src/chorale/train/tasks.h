// The kinds of jobs; each has a file of its own.
#pragma once

#include "chorale/train/task.h"

namespace chorale::train {

std::unique_ptr<TaskKind> fashion_kind();
std::unique_ptr<TaskKind> gpt_kind();
std::unique_ptr<TaskKind> bert_kind();

// All of them, new each time: they hold the values of their options.
std::vector<std::unique_ptr<TaskKind>> task_kinds();

}  // namespace chorale::train
