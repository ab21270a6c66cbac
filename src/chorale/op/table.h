// The op table: every row, joined from the families' arrays.
#pragma once

#include <span>
#include <string_view>

#include "chorale/op/op_def.h"

namespace chorale::op {

using Rows = std::span<const OpDef* const>;

// One per family, defined in op/defs/.
Rows convolution_rows();
Rows copy_rows();
Rows arithmetic_rows();
Rows order_rows();
Rows function_rows();
Rows activation_rows();
Rows logic_rows();
Rows complex_rows();
Rows creation_rows();
Rows reduce_rows();
Rows linalg_rows();
Rows pick_rows();
Rows statistics_rows();
Rows sort_rows();
Rows scan_rows();
Rows product_rows();
Rows random_rows();
Rows view_rows();
Rows shape_rows();
Rows index_rows();
Rows embedding_rows();
Rows sparse_rows();
Rows softmax_rows();
Rows layer_norm_rows();
Rows group_norm_rows();
Rows batch_norm_rows();
Rows cross_entropy_rows();
Rows loss_rows();
Rows pool_rows();
Rows interpolate_rows();
Rows dropout_rows();
Rows attention_rows();
Rows update_rows();
Rows gradient_list_rows();

// All rows, by family. The first call joins them and gives them their numbers (RowFacts); an op that runs has been
// there.
Rows all_ops();
// The row of that name, or null.
const OpDef* find_op(std::string_view name);
// What a row computes, for people: the expression of a pointwise row, otherwise what the row says.
std::string_view formula_of(const OpDef& row);

}  // namespace chorale::op
