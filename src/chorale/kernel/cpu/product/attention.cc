#include "chorale/kernel/cpu/product/attention.h"

#include <algorithm>
#include <optional>

#include "chorale/base/parallel_for.h"
#include "chorale/kernel/cpu/dropout.h"
#include "chorale/kernel/cpu/product/attention_core.h"
#include "chorale/kernel/cpu/support/copy.h"
#include "chorale/kernel/cpu/support/floating.h"
#include "chorale/kernel/nn_attrs.h"
#include "chorale/kernel/stretch.h"

namespace chorale::kernel::cpu {
namespace {

// Queries that share the work of packing a head's keys.
constexpr int64_t kQueriesPerCall = 128;
// Multiplications that are worth a thread.
constexpr int64_t kAttentionGrain = 1 << 18;

int64_t padded(int64_t n) { return (n + kAttentionPad - 1) / kAttentionPad * kAttentionPad; }

// A tensor [leading…, rows, columns] as a list of matrices in row-major order of the leading dimensions.
class Heads {
 public:
  explicit Heads(const Tensor& x) : x_(x) {
    for (int64_t d = 0; d + 2 < x.dims(); ++d) count_ *= x.size(d);
  }
  int64_t count() const { return count_; }
  int64_t rows() const { return x_.size(-2); }
  int64_t columns() const { return x_.size(-1); }
  int64_t row_stride() const { return x_.stride(-2); }
  int64_t column_stride() const { return x_.stride(-1); }
  template <class S>
  S* at(int64_t index) const {
    int64_t offset = 0;
    for (int64_t d = x_.dims() - 3; d >= 0; --d) {
      offset += index % x_.size(d) * x_.stride(d);
      index /= x_.size(d);
    }
    return x_.data<S>() + offset;
  }

 private:
  const Tensor& x_;
  int64_t count_ = 1;
};

// Is a matrix of S fit to be computed with where it is?
template <class S>
bool usable(const Heads& heads, bool whole_vectors) {
  return std::is_same_v<S, Compute<S>> && (heads.column_stride() == 1 || heads.columns() <= 1) &&
         (!whole_vectors || heads.columns() == padded(heads.columns()));
}

// A matrix to read: in place, or as a copy whose columns are padded with zeros.
template <class S>
class Input {
 public:
  using C = Compute<S>;

  Input(const Heads& heads, int64_t index, bool whole_vectors)
      : copied_(!usable<S>(heads, whole_vectors)),
        width_(padded(heads.columns())),
        memory_(copied_ ? static_cast<size_t>(heads.rows() * width_) * sizeof(C) : 0) {
    const S* from = heads.at<const S>(index);
    if constexpr (std::is_same_v<S, C>) {
      if (!copied_) {
        rows_ = {from, heads.row_stride()};
        return;
      }
    }
    C* to = memory_.as<C>();
    rows_ = {to, width_};
    const int64_t rows = heads.rows(), columns = heads.columns(), row = heads.row_stride(),
                  step = heads.column_stride();
    const vec::Convert widen = vec::convert_loop(dtype_of<S>, dtype_of<C>);
    for (int64_t i = 0; i < rows; ++i, from += row, to += width_) {
      if (step == 1) {
        widen(from, to, columns);
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j] = static_cast<C>(from[j * step]);
      }
      std::fill(to + columns, to + width_, C(0));
    }
  }
  RowsOf<const C> rows() const { return rows_; }

 private:
  bool copied_;
  int64_t width_;
  Scratch memory_;
  RowsOf<const C> rows_;
};

// A matrix to add to, zero at first: in place, or beside its place until store().
template <class S>
class Sum {
 public:
  using C = Compute<S>;

  Sum(const Heads& heads, int64_t index)
      : heads_(heads),
        to_(heads.at<S>(index)),
        beside_(!usable<S>(heads, true)),
        width_(padded(heads.columns())),
        memory_(beside_ ? static_cast<size_t>(heads.rows() * width_) * sizeof(C) : 0) {
    rows_ = {memory_.as<C>(), width_};
    if constexpr (std::is_same_v<S, C>) {
      if (!beside_) rows_ = {to_, heads.row_stride()};
    }
    for (int64_t i = 0; i < heads.rows(); ++i) std::fill(rows_.row(i), rows_.row(i) + width_, C(0));
  }
  RowsOf<C> rows() const { return rows_; }
  void store() const {
    if (!beside_) return;
    const int64_t rows = heads_.rows(), columns = heads_.columns(), step = heads_.column_stride();
    const vec::Convert narrow = vec::convert_loop(dtype_of<C>, dtype_of<S>);
    for (int64_t i = 0; i < rows; ++i) {
      S* to = to_ + i * heads_.row_stride();
      const C* from = rows_.row(i);
      if (step == 1) {
        narrow(from, to, columns);
      } else {
        for (int64_t j = 0; j < columns; ++j) to[j * step] = static_cast<S>(from[j]);
      }
    }
  }

 private:
  const Heads& heads_;
  S* to_;
  bool beside_;
  int64_t width_;
  Scratch memory_;
  RowsOf<C> rows_;
};

// What all heads of a call have in common.
class Plan {
 public:
  Plan(const Tensor& queries, const Tensor& keys, const Tensor& values, const Tensor& mask, const Tensor& stretch,
       const AttentionAttrs& attrs)
      : q(queries), k(keys), v(values), attrs_(attrs), scores_(queries.sizes()) {
    scores_.back() = keys.size(-2);
    if (attrs.dropout_p > 0) stretch_.emplace(stretch, scores_);
    if (queries.dims() >= 3 && keys.size(-3) > 0) {
      query_heads_ = queries.size(-3);
      group_ = queries.size(-3) / keys.size(-3);
    }
    if (!mask.defined()) return;
    mask_ = mask.view_as(scores_, broadcast_strides(mask.sizes(), mask.strides(), scores_), mask.offset());
  }

  // Heads of queries per head of keys and values.
  int64_t group() const { return group_; }
  int64_t key_head(int64_t head) const {
    return head / query_heads_ * (query_heads_ / group_) + head % query_heads_ / group_;
  }

  template <class C>
  AttentionHead<C> head(int64_t index, RowsOf<const C> q_rows, RowsOf<const C> k_rows, RowsOf<const C> v_rows) const {
    AttentionHead<C> h{q.rows(),      k.rows(), q.columns(), v.columns(),
                       q_rows,        k_rows,   v_rows,      static_cast<C>(attrs_.scale),
                       attrs_.causal, {},       {}};
    if (mask_.defined()) {
      const void* data = visit_dtype(mask_.dtype(), [&](auto tag) -> const void* {
        return Heads(mask_).at<const typename decltype(tag)::type>(index);
      });
      h.mask = {data, mask_.dtype(), mask_.stride(-2), mask_.stride(-1)};
    }
    if (attrs_.dropout_p > 0) {
      h.dropout.threshold = dropout_threshold(attrs_.dropout_p);
      h.dropout.keep_scale = attrs_.dropout_p < 1 ? 1 / (1 - attrs_.dropout_p) : 0;
      h.dropout.stream = stretch_->stream;
      h.dropout.first_word = static_cast<uint64_t>(whole_index(*stretch_, scores_, index * q.rows() * k.rows()));
    }
    return h;
  }
  // Multiplications of one head.
  int64_t work() const { return q.rows() * k.rows() * (q.columns() + v.columns()); }

  Heads q, k, v;

 private:
  const AttentionAttrs& attrs_;
  int64_t query_heads_ = 1, group_ = 1;
  Shape scores_;  // of the weights: [.., queries, keys]
  std::optional<Stretch> stretch_;
  Tensor mask_;
};

int64_t grain(int64_t work) { return std::max<int64_t>(1, kAttentionGrain / std::max<int64_t>(1, work)); }

template <class S>
void forward(const Plan& plan, const Heads& out, Compute<S>* lse) {
  using C = Compute<S>;
  const int64_t queries = plan.q.rows(), calls = (queries + kQueriesPerCall - 1) / kQueriesPerCall;
  parallel_for(plan.q.count() * calls, grain(plan.work() / std::max<int64_t>(1, calls)),
               [&](int64_t begin, int64_t end) {
                 for (int64_t unit = begin; unit < end; ++unit) {
                   const int64_t head = unit / calls, first = unit % calls * kQueriesPerCall;
                   const int64_t count = std::min(kQueriesPerCall, queries - first), key_head = plan.key_head(head);
                   const Input<S> q(plan.q, head, false), k(plan.k, key_head, false), v(plan.v, key_head, true);
                   const auto h = plan.head<C>(head, q.rows(), k.rows(), v.rows());
                   S* to = out.at<S>(head) + first * out.row_stride();
                   C* to_lse = lse + head * queries + first;
                   if constexpr (std::is_same_v<S, C>) {
                     attention_forward(h, first, count, {to, out.row_stride()}, to_lse);
                   } else {
                     const Scratch result(static_cast<size_t>(count * out.columns()) * sizeof(C));
                     attention_forward(h, first, count, {result.as<C>(), out.columns()}, to_lse);
                     for (int64_t i = 0; i < count; ++i) {
                       vec::convert_loop(dtype_of<C>, dtype_of<S>)(result.as<C>() + i * out.columns(),
                                                                   to + i * out.row_stride(), out.columns());
                     }
                   }
                 }
               });
}

struct Gradients {
  Tensor dout, out;
  Tensor dlse, lse;  // contiguous, in C; dlse may be undefined
  const Tensor &dq, &dk, &dv;
};

// A piece of work is all that adds to one head of keys and values, in a fixed order.
template <class S>
void backward(const Plan& plan, const Gradients& g) {
  using C = Compute<S>;
  const Heads dout(g.dout), out(g.out), dq(g.dq), dk(g.dk), dv(g.dv);
  const int64_t queries = plan.q.rows();
  parallel_for(plan.k.count(), grain(2 * plan.work() * plan.group()), [&](int64_t begin, int64_t end) {
    for (int64_t key_head = begin; key_head < end; ++key_head) {
      const Input<S> k(plan.k, key_head, true), v(plan.v, key_head, true);
      const Sum<S> sum_k(dk, key_head), sum_v(dv, key_head);
      for (int64_t member = 0; member < plan.group(); ++member) {
        const int64_t head = key_head * plan.group() + member;
        const Input<S> q(plan.q, head, true), o(out, head, false), d(dout, head, true);
        const Sum<S> sum_q(dq, head);
        attention_backward(
            plan.head<C>(head, q.rows(), k.rows(), v.rows()),
            {o.rows(), d.rows(), g.lse.data<C>() + head * queries,
             g.dlse.defined() ? g.dlse.data<C>() + head * queries : nullptr, sum_q.rows(), sum_k.rows(), sum_v.rows()});
        sum_q.store();
      }
      sum_k.store();
      sum_v.store();
    }
  });
}

}  // namespace

void attention(const KernelArgs& args) {
  const Plan plan(args.in[0], args.in[1], args.in[2], args.in[3], args.in[4], args.attrs.get<AttentionAttrs>());
  visit_floating(args.in[0].dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    forward<S>(plan, Heads(args.out[0]), args.out[1].data<Compute<S>>());
  });
}

void attention_backward(const KernelArgs& args) {
  const Plan plan(args.in[2], args.in[3], args.in[4], args.in[5], args.in[8], args.attrs.get<AttentionAttrs>());
  visit_floating(args.in[2].dtype(), [&](auto tag) {
    using S = typename decltype(tag)::type;
    constexpr DType kCompute = dtype_of<Compute<S>>;
    Tensor dout = args.in[0];
    if (!dout.defined()) {
      dout = Tensor::empty(args.in[6].sizes(), args.in[6].dtype());
      std::fill(dout.data<S>(), dout.data<S>() + dout.elems(), S());
    }
    backward<S>(plan, {dout, args.in[6], args.in[1].defined() ? contiguous(args.in[1], kCompute) : Tensor(),
                       contiguous(args.in[7], kCompute), args.out[0], args.out[1], args.out[2]});
  });
}

}  // namespace chorale::kernel::cpu
