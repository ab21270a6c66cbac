#include "chorale/rpc/courier.h"

#include "chorale/rpc/core.h"

namespace chorale::rpc {
namespace {

using dist_autograd::Gradients;
using dist_autograd::Marks;
using dist_autograd::Notice;
using dist_autograd::ReturnedGradients;

class FutureLatch final : public dist_autograd::Latch {
 public:
  explicit FutureLatch(const std::shared_ptr<Helper>& helper) : opened_(std::make_shared<Future<void>::State>(helper)) {
    opened_.state()->set_helps_backward();
  }
  void open() override { opened_.state()->try_set({}); }
  bool wait(Deadline deadline) override { return opened_.state()->wait(deadline); }

 private:
  Future<void> opened_;
};

MessageKind kind_of(Notice::Kind kind) {
  return kind == Notice::Kind::kSettle  ? MessageKind::kSettle
         : kind == Notice::Kind::kAbort ? MessageKind::kAbort
                                        : MessageKind::kCleanup;
}

}  // namespace

void RpcCourier::send(int to, Gradients gradients, Done done) {
  Writer writer;
  writer.number(gradients.context);
  writer.number(gradients.run);
  writer.number(gradients.hop);
  write(writer, gradients.retain_graph);
  write(writer, gradients.accounted);
  write(writer, gradients.tensors);
  write(writer, gradients.absent);
  core_.request(
      to, {.kind = MessageKind::kGradient, .payload = std::move(writer.payload), .tensors = std::move(writer.tensors)},
      {.timeout = Timeout(0), .of_backward = true},
      [done = std::move(done)](const Message& answer, const std::exception_ptr& error) {
        if (error) return done({}, error);
        std::vector<ReturnedGradients> returned;
        try {
          for (Reader reader(answer.payload, answer.tensors); reader.left() > 0;) {
            const auto hop = reader.number<uint64_t>();
            returned.push_back({hop, read<std::vector<Tensor>>(reader)});
          }
        } catch (const std::exception&) {
          return done({}, std::current_exception());
        }
        done(std::move(returned), nullptr);
      });
}

void RpcCourier::send(int to, Marks marks, Marked done) {
  Writer writer;
  writer.number(marks.context);
  writer.number(marks.run);
  write(writer, marks.hops);
  core_.request(to, {.kind = MessageKind::kMark, .payload = std::move(writer.payload)}, {.timeout = Timeout(0)},
                [done = std::move(done)](const Message& answer, const std::exception_ptr& error) {
                  if (error) return done({}, error);
                  std::vector<int> workers;
                  try {
                    Reader reader(answer.payload, {});
                    workers = read<std::vector<int>>(reader);
                  } catch (const std::exception&) {
                    return done({}, std::current_exception());
                  }
                  done(workers, nullptr);
                });
}

void RpcCourier::send(int to, Notice notice) {
  Writer writer;
  writer.number(notice.context);
  writer.number(notice.run);
  write(writer, notice.here_only);
  core_.send_control(to, {.kind = kind_of(notice.kind), .payload = std::move(writer.payload)});
}

std::unique_ptr<dist_autograd::Latch> RpcCourier::make_latch() { return std::make_unique<FutureLatch>(core_.helper()); }

void RpcCourier::serve(int from, Message request) {
  Reader reader(request.payload, request.tensors);
  const auto context = reader.number<uint64_t>(), run = reader.number<uint64_t>();
  switch (request.kind) {
    case MessageKind::kGradient: {
      Gradients gradients{.context = context, .run = run, .hop = reader.number<uint64_t>()};
      gradients.retain_graph = read<bool>(reader);
      gradients.accounted = read<bool>(reader);
      gradients.tensors = read<std::vector<Tensor>>(reader);
      gradients.absent = read<std::vector<uint64_t>>(reader);
      reader.finish();
      core_.contexts().came(
          from, gradients,
          [this, from, id = request.id](std::vector<ReturnedGradients> returned, const std::exception_ptr& error) {
            if (error) return core_.answer_error(from, id, error);
            Writer answer;
            for (ReturnedGradients& each : returned) {
              answer.number(each.hop);
              write(answer, each.tensors);
              each.tensors.clear();  // what only the message has need not be copied
            }
            core_.answer(from, id,
                         {.kind = MessageKind::kReturn,
                          .payload = std::move(answer.payload),
                          .tensors = std::move(answer.tensors)});
          });
      return;
    }
    case MessageKind::kMark: {
      Marks marks{.context = context, .run = run, .hops = read<std::vector<uint64_t>>(reader)};
      reader.finish();
      core_.contexts().came(
          marks, [this, from, id = request.id](const std::vector<int>& workers, const std::exception_ptr& error) {
            if (error) return core_.answer_error(from, id, error);
            Writer writer;
            write(writer, workers);
            core_.answer(from, id, {.kind = MessageKind::kReturn, .payload = std::move(writer.payload)});
          });
      return;
    }
    default: {
      const bool here_only = read<bool>(reader);
      reader.finish();
      core_.contexts().came(from, Notice{request.kind == MessageKind::kSettle  ? Notice::Kind::kSettle
                                         : request.kind == MessageKind::kAbort ? Notice::Kind::kAbort
                                                                               : Notice::Kind::kCleanup,
                                         context, run, here_only});
      core_.answer(from, request.id, {.kind = MessageKind::kReturn});
    }
  }
}

}  // namespace chorale::rpc
