#include "chorale/kernel/cpu/dnnl/convolution.h"

#include "chorale/base/error.h"
#include "chorale/kernel/cpu/dnnl/primitive.h"
#include "chorale/kernel/cpu/support/scratch.h"

namespace chorale::kernel::cpu::dnnl {
namespace {

using ::dnnl::memory;
using Tag = memory::format_tag;

enum class Pass { kForward, kBackwardData, kBackwardWeights };

// The layout of activations that a primitive works in. oneDNN's own choice is one of blocks of channels.
enum class Inside { kChannelsFirst, kChannelsLast, kOwnChoice };

// Which one is fastest, its reorderings included: measured on one core of Zen 4 over layers of small CNNs and of
// ResNet-50, f32, batch 8. Milliseconds for activations that we hold channels first, inside: first / last / own choice,
//   forward          64 -> 64, 3 x 3, 56^2      23.4 / 19.5 / 17.6
//                    64 -> 64, 1 x 1, 56^2       1.9 /  4.4 /  2.8 (it is a matrix product)
//   backward data    3 -> 64, 7 x 7, 224^2      28.4 / 97.5 / 95.2 (blocks of 16 channels, 3 of them used)
//   backward weights 64 -> 256, 1 x 1, 56^2      9.9 / 22.2 / 12.3
//                    512 -> 512, 3 x 3, 7^2     20.7 / 22.8 / 25.0
//                    128 -> 128 in 32 groups     6.3 /  3.2 /  6.3
// and channels last,
//   forward          64 -> 64, 3 x 3, 56^2      26.0 / 16.5 / 18.2
//                    512 -> 512, 3 x 3, 7^2     19.7 / 17.2 / 15.2
Inside inside(const Convolution& c, Pass pass) {
  int64_t positions = 1;
  bool ones = c.groups == 1, strided = false;
  for (size_t i = 0; i < static_cast<size_t>(c.spatial); ++i) {
    positions *= c.out[i];
    ones = ones && c.kernel[i] == 1 && c.pad[i] == 0;
    strided = strided || c.stride[i] != 1;
  }
  const bool few_positions = positions <= 64;
  if (pass == Pass::kBackwardData && c.groups == 1 && c.in_channels < 8) return Inside::kChannelsFirst;
  if (c.channels_last) {
    return pass == Pass::kForward && few_positions ? Inside::kOwnChoice : Inside::kChannelsLast;
  }
  if (pass == Pass::kBackwardWeights) {
    if (c.groups > 1) return c.groups == c.in_channels ? Inside::kOwnChoice : Inside::kChannelsLast;
    return ones || few_positions ? Inside::kChannelsFirst : Inside::kOwnChoice;
  }
  const bool product = ones && (!strided || pass == Pass::kBackwardData) && positions >= 14 * 14;
  return product ? Inside::kChannelsFirst : Inside::kOwnChoice;
}

memory::dims dims(const std::array<int64_t, 3>& values, int spatial) {
  return {values.begin(), values.begin() + spatial};
}

memory::dims activation_dims(const Convolution& c, int64_t channels, const std::array<int64_t, 3>& size) {
  memory::dims d{c.batch, channels};
  d.insert(d.end(), size.begin(), size.begin() + c.spatial);
  return d;
}

Tag activation_tag(int spatial, bool channels_last) {
  constexpr Tag kFirst[] = {Tag::ncw, Tag::nchw, Tag::ncdhw}, kLast[] = {Tag::nwc, Tag::nhwc, Tag::ndhwc};
  return (channels_last ? kLast : kFirst)[spatial - 1];
}

memory::desc activations(const Convolution& c, int64_t channels, const std::array<int64_t, 3>& size) {
  return {activation_dims(c, channels, size), type_of(c.dtype), activation_tag(c.spatial, c.channels_last)};
}

memory::desc weights(const Convolution& c) {
  constexpr Tag kPlain[] = {Tag::oiw, Tag::oihw, Tag::oidhw}, kGrouped[] = {Tag::goiw, Tag::goihw, Tag::goidhw};
  memory::dims d{c.out_channels / c.groups, c.in_channels / c.groups};
  if (c.groups > 1) d.insert(d.begin(), c.groups);
  d.insert(d.end(), c.kernel.begin(), c.kernel.begin() + c.spatial);
  return {d, type_of(c.dtype), (c.groups > 1 ? kGrouped : kPlain)[c.spatial - 1]};
}

// What may be in any layout, for the primitive to choose.
memory::desc open(const memory::desc& desc) { return {desc.dims(), desc.data_type(), Tag::any}; }

// One operand: how we hold it, how the primitive wants it, and the way between the two if they differ.
struct Operand {
  Primitive reorder;
  size_t bytes = 0;  // of the primitive's copy; 0: none is needed
};

Operand operand(const memory::desc& ours, const memory::desc& theirs, bool result) {
  if (ours == theirs) return {};
  const memory::desc &from = result ? theirs : ours, &to = result ? ours : theirs;
  ::dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(::dnnl::scratchpad_mode::user);
  const ::dnnl::reorder::primitive_desc d(engine(), from, engine(), to, attributes);
  return {Primitive(::dnnl::reorder(d), d.scratchpad_desc(), {{DNNL_ARG_FROM, from}, {DNNL_ARG_TO, to}}),
          theirs.get_size()};
}

struct Entry {
  Primitive primitive;  // empty: oneDNN has none
  Operand x, w, y;
};

// The padding behind the last element: the one in front where that gives the size of y, else what the last window
// needs.
memory::dims padding_behind(const Convolution& c) {
  memory::dims behind;
  for (size_t i = 0; i < static_cast<size_t>(c.spatial); ++i) {
    const int64_t window = (c.kernel[i] - 1) * c.dilation[i] + 1;
    const bool symmetric = (c.in[i] + 2 * c.pad[i] - window) / c.stride[i] + 1 == c.out[i];
    behind.push_back(symmetric ? c.pad[i] : (c.out[i] - 1) * c.stride[i] + window - c.in[i] - c.pad[i]);
  }
  return behind;
}

Entry build(const Convolution& c, Pass pass, bool with_bias) {
  const memory::desc x = activations(c, c.in_channels, c.in), y = activations(c, c.out_channels, c.out), w = weights(c);
  const Inside layout = inside(c, pass);
  const auto wanted = [&](int64_t channels, const std::array<int64_t, 3>& size) {
    return memory::desc(
        activation_dims(c, channels, size), type_of(c.dtype),
        layout == Inside::kOwnChoice ? Tag::any : activation_tag(c.spatial, layout == Inside::kChannelsLast));
  };
  const memory::desc px = wanted(c.in_channels, c.in), py = wanted(c.out_channels, c.out), pw = open(w);
  const memory::desc bias = with_bias ? memory::desc({c.out_channels}, type_of(c.dtype), Tag::a) : memory::desc();
  const memory::dims stride = dims(c.stride, c.spatial), front = dims(c.pad, c.spatial), behind = padding_behind(c);
  memory::dims dilation = dims(c.dilation, c.spatial);
  for (int64_t& d : dilation) d -= 1;  // oneDNN counts the gaps
  ::dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(::dnnl::scratchpad_mode::user);
  constexpr auto kDirect = ::dnnl::algorithm::convolution_direct;

  // The backward passes ask for the forward one as a hint.
  using Forward = ::dnnl::convolution_forward;
  const Forward::primitive_desc forward(
      with_bias && pass == Pass::kForward
          ? Forward::desc(::dnnl::prop_kind::forward_training, kDirect, px, pw, bias, py, stride, dilation, front,
                          behind)
          : Forward::desc(::dnnl::prop_kind::forward_training, kDirect, px, pw, py, stride, dilation, front, behind),
      attributes, engine());
  Entry entry;
  const auto finish = [&](const ::dnnl::primitive& primitive, const memory::desc& scratchpad, const memory::desc& dx,
                          const memory::desc& dw, const memory::desc& dy, std::array<int, 4> kinds) {
    entry.x = operand(x, dx, pass == Pass::kBackwardData);
    entry.w = operand(w, dw, pass == Pass::kBackwardWeights);
    entry.y = operand(y, dy, pass == Pass::kForward);
    entry.primitive =
        with_bias ? Primitive(primitive, scratchpad, {{kinds[0], dx}, {kinds[1], dw}, {kinds[2], dy}, {kinds[3], bias}})
                  : Primitive(primitive, scratchpad, {{kinds[0], dx}, {kinds[1], dw}, {kinds[2], dy}});
  };
  switch (pass) {
    case Pass::kForward:
      finish(Forward(forward), forward.scratchpad_desc(), forward.src_desc(), forward.weights_desc(),
             forward.dst_desc(), {DNNL_ARG_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DST, DNNL_ARG_BIAS});
      break;
    case Pass::kBackwardData: {
      using Backward = ::dnnl::convolution_backward_data;
      const Backward::primitive_desc d(Backward::desc(kDirect, px, pw, py, stride, dilation, front, behind), attributes,
                                       engine(), forward);
      finish(Backward(d), d.scratchpad_desc(), d.diff_src_desc(), d.weights_desc(), d.diff_dst_desc(),
             {DNNL_ARG_DIFF_SRC, DNNL_ARG_WEIGHTS, DNNL_ARG_DIFF_DST, 0});
      break;
    }
    case Pass::kBackwardWeights: {
      using Backward = ::dnnl::convolution_backward_weights;
      const Backward::primitive_desc d(with_bias
                                           ? Backward::desc(kDirect, px, pw, bias, py, stride, dilation, front, behind)
                                           : Backward::desc(kDirect, px, pw, py, stride, dilation, front, behind),
                                       attributes, engine(), forward);
      finish(Backward(d), d.scratchpad_desc(), d.src_desc(), d.diff_weights_desc(), d.diff_dst_desc(),
             {DNNL_ARG_SRC, DNNL_ARG_DIFF_WEIGHTS, DNNL_ARG_DIFF_DST, DNNL_ARG_DIFF_BIAS});
      break;
    }
  }
  return entry;
}

Entry& entry_of(const Convolution& c, Pass pass, bool with_bias) {
  thread_local Cache<Entry> cache;
  const auto at = [&](const std::array<int64_t, 3>& values, int i) {
    return i < c.spatial ? values[static_cast<size_t>(i)] : 0;
  };
  const Key key{static_cast<int64_t>(c.dtype) * 64 + static_cast<int64_t>(pass) * 16 + c.spatial * 4 +
                    (c.channels_last ? 2 : 0) + (with_bias ? 1 : 0),
                c.batch,
                c.groups,
                c.in_channels,
                c.out_channels,
                at(c.in, 0),
                at(c.in, 1),
                at(c.in, 2),
                at(c.out, 0),
                at(c.out, 1),
                at(c.out, 2),
                at(c.kernel, 0),
                at(c.kernel, 1),
                at(c.kernel, 2),
                at(c.stride, 0),
                at(c.stride, 1),
                at(c.stride, 2),
                at(c.pad, 0),
                at(c.pad, 1),
                at(c.pad, 2),
                at(c.dilation, 0),
                at(c.dilation, 1),
                at(c.dilation, 2)};
  return cache.get(key, [&]() -> Entry {
    try {
      return build(c, pass, with_bias);
    } catch (const ::dnnl::error& e) {
      if (e.status == dnnl_unimplemented || e.status == dnnl_invalid_arguments) return {};
      throw InternalError(concat("oneDNN: ", e.what(), " (status ", static_cast<int>(e.status), ")"));
    }
  });
}

bool run(const Convolution& c, Pass pass, void* x, void* w, void* y, void* bias) {
  Entry& entry = entry_of(c, pass, bias != nullptr);
  if (!entry.primitive) return false;
  const Scratch x_copy(entry.x.bytes), w_copy(entry.w.bytes), y_copy(entry.y.bytes);
  // Copies inputs into the primitive's layout and returns the address that it is to use.
  const auto prepare = [](Operand& o, void* ours, const Scratch& copy, bool result) {
    if (o.bytes == 0) return ours;
    if (!result) o.reorder.run({ours, copy.as<void>()});
    return copy.as<void>();
  };
  void* px = prepare(entry.x, x, x_copy, pass == Pass::kBackwardData);
  void* pw = prepare(entry.w, w, w_copy, pass == Pass::kBackwardWeights);
  void* py = prepare(entry.y, y, y_copy, pass == Pass::kForward);
  if (bias != nullptr) {
    entry.primitive.run({px, pw, py, bias});
  } else {
    entry.primitive.run({px, pw, py});
  }
  const auto collect = [](Operand& o, void* theirs, void* ours) {
    if (o.bytes != 0) o.reorder.run({theirs, ours});
  };
  if (pass == Pass::kForward) collect(entry.y, py, y);
  if (pass == Pass::kBackwardData) collect(entry.x, px, x);
  if (pass == Pass::kBackwardWeights) collect(entry.w, pw, w);
  return true;
}

}  // namespace

bool convolution_forward(const Convolution& c, const void* x, const void* w, const void* bias, void* y) {
  return run(c, Pass::kForward, const_cast<void*>(x), const_cast<void*>(w), y, const_cast<void*>(bias));
}

bool convolution_backward_data(const Convolution& c, const void* dy, const void* w, void* dx) {
  return run(c, Pass::kBackwardData, dx, const_cast<void*>(w), const_cast<void*>(dy), nullptr);
}

bool convolution_backward_weights(const Convolution& c, const void* x, const void* dy, void* dw, void* dbias) {
  return run(c, Pass::kBackwardWeights, const_cast<void*>(x), dw, const_cast<void*>(dy), dbias);
}

}  // namespace chorale::kernel::cpu::dnnl
