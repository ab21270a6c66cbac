#include "chorale/op/table.h"

#include <algorithm>
#include <unordered_map>

#include "chorale/vec/expression.h"

namespace chorale::op {

Rows collective_rows();  // op/defs/collective.cc
Rows message_rows();     // op/defs/message.cc
Rows fp8_rows();         // op/defs/fp8.cc

namespace {

// "x, weight, bias?": 2; "x, indices?...": 1 and all behind it.
InputSet optional_inputs(std::string_view names) {
  InputSet optional;
  for (size_t i = 0; !names.empty(); ++i) {
    const std::string_view name = names.substr(0, names.find(','));
    if (name.find('?') != std::string_view::npos) {
      optional = optional | (name.ends_with("...") ? InputSet::from(i) : InputSet{i});
    }
    names.remove_prefix(std::min(name.size() + 1, names.size()));
  }
  return optional;
}

}  // namespace

Rows all_ops() {
  static const std::vector<const OpDef*> rows = [] {
    std::vector<const OpDef*> all;
    for (Rows family : {
             convolution_rows(), copy_rows(),          arithmetic_rows(), order_rows(),         function_rows(),
             activation_rows(),  logic_rows(),         complex_rows(),    creation_rows(),      reduce_rows(),
             linalg_rows(),      pick_rows(),          statistics_rows(), sort_rows(),          scan_rows(),
             product_rows(),     random_rows(),        view_rows(),       shape_rows(),         index_rows(),
             embedding_rows(),   sparse_rows(),        softmax_rows(),    layer_norm_rows(),    group_norm_rows(),
             batch_norm_rows(),  cross_entropy_rows(), loss_rows(),       pool_rows(),          interpolate_rows(),
             dropout_rows(),     attention_rows(),     update_rows(),     gradient_list_rows(), collective_rows(),
             message_rows(),     fp8_rows(),
         }) {
      all.insert(all.end(), family.begin(), family.end());
    }
    for (size_t i = 0; i < all.size(); ++i) all[i]->facts = {static_cast<uint16_t>(i), optional_inputs(all[i]->inputs)};
    return all;
  }();
  return rows;
}

const OpDef* find_op(std::string_view name) {
  static const std::unordered_map<std::string_view, const OpDef*> by_name = [] {
    std::unordered_map<std::string_view, const OpDef*> map;
    for (const OpDef* row : all_ops()) map.emplace(row->name, row);
    return map;
  }();
  const auto found = by_name.find(name);
  return found == by_name.end() ? nullptr : found->second;
}

std::string_view formula_of(const OpDef& row) { return row.pointwise ? vec::text_of(row.pointwise->op) : row.formula; }

}  // namespace chorale::op
