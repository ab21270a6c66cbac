#include "chorale/rpc/message.h"

#include <algorithm>
#include <cstring>

#include "chorale/autograd/autograd.h"
#include "chorale/comm/shared_copy.h"
#include "chorale/op/copy.h"

namespace chorale::rpc {
namespace {

constexpr uint32_t kMagic = 0x31706372;  // "rcp1"
constexpr size_t kAlignment = 64;
// A view that reaches over at least so many bytes is copied if it uses less than half of them.
constexpr size_t kWastefulBytes = 8 << 10;

struct Head {
  uint32_t magic;
  uint8_t kind;
  uint8_t unused[3];
  uint64_t id, context, hop_or_number, chain_or_report;
  uint64_t tensors, payload_bytes;
  uint64_t tag;
};
static_assert(sizeof(Head) == 64);

enum Flags : uint8_t { kSparse = 1, kCoalesced = 2, kRequiresGrad = 4, kAll = 7 };
enum class Where : uint8_t { kHere, kApart };

size_t align(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

// The stretch of memory of a dense tensor.
struct Stretch {
  Tensor of;
  int64_t low = 0;
  size_t bytes = 0;
  const std::byte* data() const {
    return static_cast<const std::byte*>(of.raw()) + low * static_cast<int64_t>(of.elem_bytes());
  }
};

Stretch stretch_of(const Tensor& x) {
  CHORALE_CHECK(x.device() == kCpu, "[rpc] a tensor on ", x.device(),
                " cannot be sent: there is no map of devices; copy it to the CPU");
  CHORALE_CHECK(!x.extension(), "[rpc] ", x.extension()->why_no_bytes(x));
  if (x.elems() == 0) return {x, 0, 0};
  const auto reach = reach_of(x.sizes(), x.strides());
  const size_t bytes = static_cast<size_t>(reach->high - reach->low) * x.elem_bytes();
  if (bytes >= kWastefulBytes && bytes >= 2 * static_cast<size_t>(x.elems()) * x.elem_bytes()) {
    const NoGrad quiet;
    return stretch_of(clone(x.alias()));
  }
  return {x, reach->low, bytes};
}

// The bytes of a stretch, in memory that nobody else can write: its own, or a copy.
Tensor bytes_of(const Stretch& stretch, bool may_lend) {
  const auto bytes = static_cast<int64_t>(stretch.bytes);
  if (may_lend) {
    const auto offset = static_cast<int64_t>(stretch.data() - stretch.of.storage()->data());
    return Tensor::on(stretch.of.storage(), {bytes}, {1}, offset, DType::kU8);
  }
  Tensor copy = Tensor::empty({bytes}, DType::kU8);
  comm::copy_shared(static_cast<std::byte*>(copy.raw()), stretch.data(), stretch.bytes);
  return copy;
}

void write_sizes(Writer& out, const Shape& sizes) {
  out.number(static_cast<uint8_t>(sizes.size()));
  for (int64_t size : sizes) out.number(size);
}
Shape read_sizes(Reader& in) {
  const auto dims = in.number<uint8_t>();
  CHORALE_CHECK(dims <= kMaxDims, "[rpc] a tensor has ", int{dims}, " dimensions");
  Shape sizes;
  for (int d = 0; d < dims; ++d) sizes.push_back(in.number<int64_t>());
  return sizes;
}

}  // namespace

std::string_view name_of(MessageKind kind) {
  constexpr std::string_view kNames[] = {"return",
                                         "error",
                                         "refused",
                                         "call",
                                         "op",
                                         "remote call",
                                         "remote op",
                                         "fetch",
                                         "user delete",
                                         "fork request",
                                         "child accept",
                                         "gradient",
                                         "mark",
                                         "settle",
                                         "abort",
                                         "cleanup",
                                         "reference backward",
                                         "gather",
                                         "leave",
                                         "hello",
                                         "type"};
  static_assert(std::size(kNames) == kMessageKinds);
  return kNames[static_cast<size_t>(kind)];
}

Outgoing pack(const Message& message, uint64_t tag) {
  CHORALE_CHECK(message.tensors.size() <= kMostTensors, "[rpc] a message has at most ", kMostTensors, " tensors, not ",
                message.tensors.size());
  Writer plans;
  std::vector<Stretch> here;
  Outgoing outgoing;
  // `x` is a tensor of the message, or a part of one.
  const auto add = [&](const Tensor& x, const Tensor& whole) {
    const Stretch stretch = stretch_of(x);
    plans.number(x.dtype());
    write_sizes(plans, stretch.of.sizes());
    for (int64_t stride : stretch.of.strides()) plans.number(stride);
    plans.number(-stretch.low);
    plans.number<uint64_t>(stretch.bytes);
    const bool apart = stretch.bytes >= kApartBytes;
    plans.number(apart ? Where::kApart : Where::kHere);
    if (!apart) return here.push_back(stretch);
    // Nobody else can write what only the message has: its list of tensors, and the stretch here.
    const bool is_alone =
        whole.use_count() <= 2 && stretch.of.use_count() <= 2 && stretch.of.storage()->use_count() == 1;
    outgoing.apart.push_back(bytes_of(stretch, is_call(message.kind) || is_alone));
  };
  for (const Tensor& x : message.tensors) {
    const bool sparse = x.is_sparse();
    plans.number(static_cast<uint8_t>((sparse ? kSparse : 0) | (sparse && x.sparse().coalesced ? kCoalesced : 0) |
                                      (requires_grad(sparse ? x.sparse().values : x) ? kRequiresGrad : 0)));
    if (sparse) {
      write_sizes(plans, x.sizes());
      add(x.sparse().indices, x);
      add(x.sparse().values, x);
    } else {
      add(x, x);
    }
  }
  size_t bytes = sizeof(Head) + plans.payload.size() + message.payload.size();
  for (const Stretch& stretch : here) bytes = align(bytes) + stretch.bytes;

  outgoing.parcel = Tensor::empty({static_cast<int64_t>(bytes)}, DType::kU8);
  auto* const first = static_cast<std::byte*>(outgoing.parcel.raw());
  std::byte* at = first;
  const auto put = [&](const void* data, size_t count) {
    if (count > 0) std::memcpy(at, data, count);
    at += count;
  };
  const Head head{kMagic,
                  static_cast<uint8_t>(message.kind),
                  {},
                  message.id,
                  message.context,
                  is_control(message.kind) ? message.number : message.hop,
                  is_request(message.kind) ? message.chain : message.report,
                  message.tensors.size(),
                  message.payload.size(),
                  tag};
  put(&head, sizeof head);
  put(plans.payload.data(), plans.payload.size());
  put(message.payload.data(), message.payload.size());
  for (const Stretch& stretch : here) {
    std::byte* const aligned = first + align(static_cast<size_t>(at - first));
    std::memset(at, 0, static_cast<size_t>(aligned - at));
    at = aligned;
    if (stretch.bytes > 0) put(stretch.data(), stretch.bytes);
  }
  return outgoing;
}

// The bytes of a dense tensor.
struct Incoming::Part {
  DType dtype;
  Shape sizes;
  Strides strides;
  int64_t offset;
  size_t bytes;
  Where where;
  size_t place;  // in the parcel, or among those apart
};
struct Incoming::Plan {
  uint8_t flags;
  Shape sizes;  // of a sparse tensor
  std::vector<Part> parts;
};

Incoming::Incoming(Incoming&&) noexcept = default;
Incoming::~Incoming() = default;

Incoming::Incoming(const Tensor& parcel) : parcel_(parcel) {
  const std::span<const std::byte> bytes(static_cast<const std::byte*>(parcel.raw()),
                                         static_cast<size_t>(parcel.elems()));
  Reader in(bytes, {});
  const auto head = in.number<Head>();
  CHORALE_CHECK(head.magic == kMagic, "[rpc] this is no message of ours");
  CHORALE_CHECK(head.kind < kMessageKinds, "[rpc] there is no message of kind ", int{head.kind});
  CHORALE_CHECK(head.tensors <= kMostTensors, "[rpc] a message has ", head.tensors, " tensors");
  message_.kind = static_cast<MessageKind>(head.kind);
  message_.id = head.id;
  message_.context = head.context;
  (is_control(message_.kind) ? message_.number : message_.hop) = head.hop_or_number;
  (is_request(message_.kind) ? message_.chain : message_.report) = head.chain_or_report;
  tag_ = head.tag;
  const auto read_part = [&] {
    Part part{};
    part.dtype = read<DType>(in);
    part.sizes = read_sizes(in);
    for (size_t d = 0; d < part.sizes.size(); ++d) part.strides.push_back(in.number<int64_t>());
    part.offset = in.number<int64_t>();
    part.bytes = in.number<uint64_t>();
    const auto where = in.number<uint8_t>();
    CHORALE_CHECK(where <= static_cast<uint8_t>(Where::kApart), "[rpc] a tensor is at place ", int{where});
    part.where = static_cast<Where>(where);
    return part;
  };
  for (uint64_t i = 0; i < head.tensors; ++i) {
    Plan plan{};
    plan.flags = in.number<uint8_t>();
    CHORALE_CHECK((plan.flags & ~kAll) == 0, "[rpc] a tensor has flags ", int{plan.flags});
    if ((plan.flags & kSparse) != 0) {
      plan.sizes = read_sizes(in);
      plan.parts.push_back(read_part());
    }
    plan.parts.push_back(read_part());
    plans_.push_back(std::move(plan));
  }
  CHORALE_CHECK(head.payload_bytes <= in.left(), "[rpc] a message promises ", head.payload_bytes,
                " bytes of values and has ", in.left());
  message_.payload.resize(head.payload_bytes);
  in.raw(message_.payload.data(), message_.payload.size());

  size_t at = bytes.size() - in.left();
  for (Plan& plan : plans_) {
    for (Part& part : plan.parts) {
      if (part.where == Where::kApart) {
        part.place = apart_.size();
        apart_.push_back(part.bytes);
        continue;
      }
      part.place = align(at);
      CHORALE_CHECK(part.place <= bytes.size() && part.bytes <= bytes.size() - part.place, "[rpc] a tensor of ",
                    part.bytes, " bytes lies outside its message");
      at = part.place + part.bytes;
    }
  }
  CHORALE_CHECK(at == bytes.size(), "[rpc] ", bytes.size() - at, " bytes follow a message");
}

Message Incoming::unpack(const std::vector<Tensor>& apart) {
  const auto make = [&](const Part& part) {
    base::Intrusive<Storage> storage;
    if (part.where == Where::kApart) {
      storage = apart[part.place].storage();
      CHORALE_CHECK(storage->bytes() >= part.bytes, "[rpc] a tensor of ", part.bytes, " bytes came as ",
                    storage->bytes());
    } else {
      // Its own storage: writes are counted for each tensor.
      storage = Storage::allocate(part.bytes, kCpu);
      if (part.bytes > 0)
        std::memcpy(storage->data(), static_cast<const std::byte*>(parcel_.raw()) + part.place, part.bytes);
    }
    return Tensor::on(std::move(storage), part.sizes, part.strides, part.offset, part.dtype);
  };
  for (const Plan& plan : plans_) {
    Tensor x = make(plan.parts.back());
    if ((plan.flags & kRequiresGrad) != 0) {
      CHORALE_CHECK(is_differentiable(x.dtype()), "[rpc] a tensor of ", x.dtype(), " cannot require a gradient");
      set_requires_grad(x);
    }
    if ((plan.flags & kSparse) != 0)
      x = Tensor::sparse_coo(make(plan.parts.front()), x, plan.sizes, (plan.flags & kCoalesced) != 0);
    message_.tensors.push_back(std::move(x));
  }
  return std::move(message_);
}

}  // namespace chorale::rpc
