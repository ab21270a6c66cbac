// Messages between two ranks as rows; what their gradients mean is said at the top of collective.cc.
#include "chorale/base/error.h"
#include "chorale/kernel/collective_attrs.h"
#include "chorale/op/builder.h"
#include "chorale/op/collective.h"
#include "chorale/op/creation.h"
#include "chorale/op/defs/pending.h"
#include "chorale/op/samples.h"
#include "chorale/op/table.h"

namespace chorale {
namespace op {
namespace {

using kernel::KernelArgs;
using kernel::MessageAttrs;

void infer_send(const InferArgs& args, std::span<OutSpec> out) {
  out[0].sizes = {0};
  out[0].dtype = args.in[0].dtype();
  out[0].device = args.in[0].device();
}
void infer_receive(const InferArgs& args, std::span<OutSpec> out) {
  const auto& a = args.attrs.get<MessageAttrs>();
  out[0].sizes = a.sizes.shape();
  out[0].dtype = a.dtype;
  out[0].device = args.in[0].device();
}

comm::Work begin_send(const KernelArgs& args, const comm::Group& group) {
  const auto& a = args.attrs.get<MessageAttrs>();
  return group.isend(args.in[0], static_cast<int>(a.peer), static_cast<uint64_t>(a.tag));
}
comm::Work begin_receive(const KernelArgs& args, const comm::Group& group, const Tensor& out) {
  const auto& a = args.attrs.get<MessageAttrs>();
  return group.irecv(out, static_cast<int>(a.peer), static_cast<uint64_t>(a.tag));
}
void run_send(const KernelArgs& args) {
  if (const comm::Group* group = group_of(args.in[1])) begin_send(args, *group).wait();
}
void run_receive(const KernelArgs& args) {
  const comm::Group* group = group_of(args.in[1]);
  if (!group) return fill_with_zeros(args.out[0]);  // samples have no group
  begin_receive(args, *group, args.out[0]).wait();
}
void start_send_kernel(const KernelArgs& args) {
  if (const comm::Group* group = group_of(args.in[1]))
    show_when_done(args.out[0], [&](const Tensor&) { return begin_send(args, *group); });
}
void start_receive_kernel(const KernelArgs& args) {
  const comm::Group* group = group_of(args.in[1]);
  if (!group) return fill_with_zeros(args.out[0]);  // samples have no group
  show_when_done(args.out[0], [&](const Tensor& bytes) { return begin_receive(args, *group, bytes); });
}

Tensors gradient_of_send(const GradArgs& g);
Tensors gradient_of_receive(const GradArgs& g);

constexpr OpDef message(const char* name, const char* inputs, Infer infer, kernel::Kernel cpu, Grad grad,
                        Samples samples, const char* formula) {
  return {.name = name,
          .inputs = inputs,
          .attrs = attrs_of<MessageAttrs>,
          .dtypes = kAll,
          .infer = infer,
          .cpu = cpu,
          .grad = grad,
          .shard = kReplicateOnly,
          .saves = saves_in({1}),
          .samples = samples,
          .formula = formula};
}

std::vector<Sample> samples_of_send() {
  return {{.in = {sample({2, 3}), Tensor::from<int64_t>({0, 1}, {2})}, .attrs = MessageAttrs{}}};
}
std::vector<Sample> samples_of_receive() {
  return {{.in = {sample({2, 3}), Tensor::from<int64_t>({0, 1}, {2})},
           .attrs = MessageAttrs{.sizes = {2}, .dtype = DType::kF64},
           .grad = false}};
}

constexpr OpDef kSend = message("send", "x, group", infer_send, run_send, gradient_of_send, samples_of_send,
                                "nothing; x goes to the rank `peer`");
constexpr OpDef kReceive = message("receive", "after, group", infer_receive, run_receive, gradient_of_receive,
                                   samples_of_receive, "what the rank `peer` sends");
constexpr OpDef kSendStart = message("send_start", "x, group", infer_send, start_send_kernel, gradient_of_send,
                                     samples_of_send, "send, begun: collective_wait waits for it");
constexpr OpDef kReceiveStart =
    message("receive_start", "after, group", infer_receive, start_receive_kernel, gradient_of_receive,
            samples_of_receive, "receive, begun: collective_wait gives its result");

Tensors gradient_of_send(const GradArgs& g) {
  auto a = g.attrs.get<MessageAttrs>();
  a.sizes = g.shape(0);
  a.dtype = g.dtype(0);
  return {call(kReceive, a, g.dout[0], g.in[1]), {}};
}
Tensors gradient_of_receive(const GradArgs& g) {
  const Tensor sent = call(kSend, g.attrs, g.dout[0], g.in[1]);
  return {full(g.shape(0), 0, g.dtype(0), sent.device()), {}};
}

}  // namespace

Rows message_rows();
Rows message_rows() {
  static constexpr const OpDef* kRows[] = {&kSend, &kReceive, &kSendStart, &kReceiveStart};
  return kRows;
}

}  // namespace op

namespace {

kernel::MessageAttrs sending(const Tensor& group, int destination, int64_t tag) {
  CHORALE_CHECK(group_of(group), "[send] a group of one has no rank to send to");
  return {.peer = destination, .tag = tag, .sizes = {}};
}
kernel::MessageAttrs receiving(const Tensor& group, int source, const Shape& sizes, DType dtype, int64_t tag) {
  CHORALE_CHECK(group_of(group), "[receive] a group of one has no rank to receive from");
  return {.peer = source, .tag = tag, .sizes = sizes, .dtype = dtype};
}

}  // namespace

Tensor send(const Tensor& x, const Tensor& group, int destination, int64_t tag) {
  return op::call(op::kSend, sending(group, destination, tag), x, group);
}
Tensor receive(const Tensor& after, const Tensor& group, int source, const Shape& sizes, DType dtype, int64_t tag) {
  return op::call(op::kReceive, receiving(group, source, sizes, dtype, tag), after, group);
}
Tensor start_send(const Tensor& x, const Tensor& group, int destination, int64_t tag) {
  return op::call(op::kSendStart, sending(group, destination, tag), x, group);
}
Tensor start_receive(const Tensor& after, const Tensor& group, int source, const Shape& sizes, DType dtype,
                     int64_t tag) {
  return op::call(op::kReceiveStart, receiving(group, source, sizes, dtype, tag), after, group);
}

}  // namespace chorale
