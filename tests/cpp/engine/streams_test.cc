// The order that streams are put in, on a device that finds races; see docs/design/streams.md.
#include <functional>

#include <fsdp/device_mesh.h>
#include <gtest/gtest.h>
#include <torch/torch.h>

#include "base/stream.h"
#include "comm/solo_channel.h"
#include "engine/context.h"
#include "engine/param_group.h"
#include "fake_device.h"
#include "mesh/world.h"

namespace fsdp::engine {
namespace {

namespace fake_device = testing::fake_device;
using fake_device::kDevice;

// What a model's first Context takes from the pool.
constexpr int64_t kCompute = 0, kGather = 1, kReduce = 2;

/// Collectives on a stream of their own, as NCCL's are: they wait for the stream that issues them, and wait() makes the
/// current stream wait. This rank's part is all that ever arrives.
class StreamChannel final : public comm::Channel {
 public:
  StreamChannel(int rank, int size)
      : inner_("stream", rank, size), stream_(base::Stream(c10::Stream(c10::Stream::UNSAFE, kDevice, 100))) {}
  int rank() const override { return inner_.rank(); }
  int size() const override { return inner_.size(); }
  const std::string& name() const override { return inner_.name(); }

  std::unique_ptr<comm::Pending> all_gather(const at::Tensor& out, const at::Tensor& mine,
                                            const shard::Segments& segments) override {
    return issue(out, [&] { return inner_.all_gather(out, mine, segments); });
  }
  std::unique_ptr<comm::Pending> reduce_scatter(const at::Tensor& out, const at::Tensor& in,
                                                const shard::Segments& segments) override {
    return issue(out, [&] { return inner_.reduce_scatter(out, in, segments); });
  }
  std::unique_ptr<comm::Pending> all_reduce(const at::Tensor& tensor, comm::ReduceOp op) override {
    return issue(tensor, [&] { return inner_.all_reduce(tensor, op); });
  }
  std::unique_ptr<comm::Pending> broadcast(const at::Tensor& tensor, int root) override {
    return inner_.broadcast(tensor, root);
  }
  std::unique_ptr<comm::Pending> all_gather_even(const at::Tensor& out, const at::Tensor& mine) override {
    return inner_.all_gather_even(out, mine);
  }

 private:
  struct Issued final : comm::Pending {
    explicit Issued(base::Stream s) : stream(s), end(s.mark()) {}
    void wait() override { base::Stream::current(kDevice).wait_for(*end); }
    bool wait_for(std::chrono::milliseconds) override {
      wait();
      return true;
    }
    base::Stream stream;
    std::optional<c10::Event> end;
  };
  template <class Fn>
  std::unique_ptr<comm::Pending> issue(const at::Tensor&, Fn&& fn) {
    stream_.wait_for_current();
    const base::OnStream lane(stream_);
    fn();
    return std::make_unique<Issued>(stream_);
  }

  comm::SoloChannel inner_;
  base::Stream stream_;
};

struct GradSlot : Slot {
  bool requires_grad() const override { return true; }
  at::Tensor run_gradient_hooks(at::Tensor gradient) override { return gradient; }
  void accumulate_gradient(const at::Tensor& local) override {
    grad = local;
    if (meanwhile) meanwhile();
  }
  void run_post_accumulate_hooks() override {}
  at::Tensor grad;
  std::function<void()> meanwhile;
};

struct Case {
  int ranks;
  bool cast;
  bool offload = false;
};

class StreamsTest : public ::testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    fake_device::reset();
    static const bool registered = [] {
      comm::register_engine("stream", [](const comm::Rendezvous& place) {
        return std::make_shared<StreamChannel>(place.rank, place.size);
      });
      return true;
    }();
    ASSERT_TRUE(registered);
    mesh::World::set_thread_world(
        std::make_shared<mesh::World>("stream", nullptr, 0, GetParam().ranks, 0, std::chrono::seconds(10)));
    const auto mesh = init_device_mesh(kDevice.type(), {GetParam().ranks});
    DtypePolicy policy;
    if (GetParam().cast) policy.param_dtype = at::kBFloat16;
    std::optional<Offload> offload;
    if (GetParam().offload) offload = Offload{kDevice};
    group = std::make_unique<ParamGroup>(
        "group", std::vector<NamedParam>{{"weight", on_device({4, 3})}, {"bias", on_device({2})}}, mesh, policy,
        Layout::kRows, offload);
    for (const auto& param : group->params()) param->set_slot(std::make_unique<GradSlot>());
    context = Context::create({group.get()}, mesh);
  }
  void TearDown() override {
    context.reset();
    group.reset();
    mesh::World::set_thread_world(nullptr);
  }

  static at::Tensor on_device(std::vector<int64_t> sizes) {
    int64_t numel = 1;
    for (const auto size : sizes) numel *= size;
    return torch::arange(numel, torch::kFloat).view(sizes).to(kDevice).set_requires_grad(true);
  }
  GradSlot& slot(const ShardedParam& param) { return static_cast<GradSlot&>(param.slot()); }

  /// What the model reads: the leaf's rows of this rank.
  at::Tensor read(const ShardedParam& param) {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard plain(kKey);
    return param.leaf().narrow(0, 0, group->rows_here(param).size()).to(at::kCPU, at::kFloat);
  }
  void gather() {
    group->begin_gather();
    group->finish_gather();
  }
  void reduce(double gradient) {
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& param : group->params()) {
      group->store_gradient(*param, torch::full(param->sizes(), gradient).to(kDevice, param->leaf().scalar_type()));
    }
    group->begin_reduce();
  }
  void hand_out() {
    const std::vector<uint8_t> used(group->params().size(), 1);
    group->finish_reduce(used.data());
    group->finish_offload();
  }
  void optimizer_step() {
    at::NoGradGuard no_grad;
    at::AutoDispatchBelowADInplaceOrView below;
    for (const auto& param : group->params()) {
      param->shard().sub_(slot(*param).grad);
      slot(*param).grad.reset();
    }
  }
  void work() { work(scratch); }
  static void work(const at::Tensor& tensor) { tensor.detach().add(1); }

  at::Tensor scratch = torch::zeros({3}).to(kDevice);
  std::unique_ptr<ParamGroup> group;
  std::shared_ptr<Context> context;
};

TEST_P(StreamsTest, ThreeStepsWithoutARace) {
  for (int step = 0; step < 3; ++step) {
    gather();
    for (const auto& param : group->params()) {
      const auto rows = group->rows_here(*param);
      const auto whole = torch::arange(param->numel(), torch::kFloat).view(param->sizes());
      // The other ranks' gradients never arrive, the mean is over all.
      const auto expected = whole.narrow(0, rows.begin, rows.size()) - 4.0 * step;
      EXPECT_TRUE(torch::equal(read(*param), expected)) << param->name() << " in step " << step;
    }
    group->reshard();
    gather();
    reduce(2.0 * GetParam().ranks);
    EXPECT_TRUE(group->wait_inputs(std::chrono::seconds(1)));
    group->reshard();
    hand_out();
    optimizer_step();
    reduce(2.0 * GetParam().ranks);
    hand_out();  // with its input unfreed until now
    optimizer_step();
  }
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
}

TEST_P(StreamsTest, EachWaitsForTheOther) {
  work();
  group->begin_gather();
  EXPECT_EQ(fake_device::seen(kGather, kCompute), fake_device::seen(kCompute, kCompute));
  group->finish_gather();
  EXPECT_EQ(fake_device::seen(kCompute, kGather), fake_device::seen(kGather, kGather));
  // The buffer that was copied from is the gather stream's only after that.
  EXPECT_EQ(fake_device::seen(kGather, kCompute), fake_device::seen(kCompute, kCompute));
  work();
  reduce(1);
  EXPECT_EQ(fake_device::seen(kReduce, kCompute), fake_device::seen(kCompute, kCompute));
  if (GetParam().ranks > 1) {
    EXPECT_LT(fake_device::seen(kCompute, 100), fake_device::seen(100, 100));
  }
  hand_out();
  EXPECT_EQ(fake_device::seen(kCompute, kReduce), fake_device::seen(kReduce, kReduce));
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
}

TEST_P(StreamsTest, OffloadedStateIsTheHostsBetweenSteps) {
  const bool offload = GetParam().offload;
  for (const auto& param : group->params()) {
    EXPECT_EQ(param->shard().is_cpu(), offload);
    EXPECT_EQ(param->leaf().device(), kDevice);
  }
  group->begin_gather();
  const auto read = fake_device::seen(kGather, kGather);
  group->finish_gather();
  EXPECT_EQ(fake_device::waited_for(kGather), 0);  // the host goes on
  if (offload) {
    EXPECT_GT(read, 0);  // the copy from the host is the gather stream's
    group->wait_for_reads();
    EXPECT_GE(fake_device::waited_for(kGather), read);
  }
  reduce(GetParam().ranks);
  const auto before = fake_device::seen(kReduce, kReduce);
  hand_out();
  EXPECT_EQ(fake_device::waited_for(kReduce), offload ? fake_device::seen(kReduce, kReduce) : 0);
  if (offload) {
    EXPECT_GT(fake_device::waited_for(kReduce), before);  // and the copies to it the reduce stream's
  }
  for (const auto& param : group->params()) {
    EXPECT_EQ(slot(*param).grad.is_cpu(), offload);
    EXPECT_TRUE(torch::equal(slot(*param).grad.to(at::kCPU), torch::ones_like(slot(*param).grad.to(at::kCPU))));
  }
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
}

TEST_P(StreamsTest, GradientsThatAreFreedWhileOthersAreReduced) {
  reduce(1);
  hand_out();
  reduce(2);
  for (const auto& param : group->params()) {
    work(slot(*param).grad);
    slot(*param).grad.reset();
  }
  hand_out();
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
}

TEST_P(StreamsTest, AnInputIsKeptFromWorkThatComesBeforeTheEnd) {
  for (const auto& param : group->params()) {
    slot(*param).meanwhile = [] {
      const auto on = base::Stream::current(kDevice);
      fake_device::use_stream(kCompute);
      torch::zeros({12}).to(kDevice);
      fake_device::use_stream((*on).id());
    };
  }
  reduce(1);
  hand_out();
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
}

TEST_P(StreamsTest, AHookRunsOnTheUsersStreamBetweenTheOthers) {
  const auto own = base::Stream::another(kDevice);
  int64_t ran_on = -1;
  group->set_all_reduce_hook(
      [&](const at::Tensor& gradients) {
        ran_on = (*base::Stream::current(kDevice)).id();
        at::AutoDispatchBelowADInplaceOrView below;
        gradients.mul_(2);
      },
      *own);
  reduce(GetParam().ranks);
  hand_out();
  EXPECT_EQ(ran_on, (*own).id());
  for (const auto& param : group->params()) {
    const auto gradient = slot(*param).grad.to(at::kCPU);
    EXPECT_TRUE(torch::equal(gradient, torch::full_like(gradient, 2))) << param->name();
  }
  optimizer_step();
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
  group->set_all_reduce_hook(nullptr);
}

TEST_P(StreamsTest, AnEventOfTheOptimizerFreesGathersFromLaterWork) {
  reduce(1);
  hand_out();
  optimizer_step();
  const auto event = std::make_shared<c10::Event>(kDevice.type());
  event->record(*base::Stream::current(kDevice));
  const auto written = fake_device::seen(kCompute, kCompute);
  work();
  context->set_optimizer_event(event);
  group->begin_gather();
  EXPECT_EQ(fake_device::seen(kGather, kCompute), written);
  group->finish_gather();
  group->reshard();
  gather();  // into the buffers of the first
  EXPECT_EQ(fake_device::races(), std::vector<std::string>());
}

TEST_P(StreamsTest, AnEventThatIsTooEarlyIsARace) {
  const auto event = std::make_shared<c10::Event>(kDevice.type());
  event->record(*base::Stream::current(kDevice));
  reduce(1);
  hand_out();
  optimizer_step();
  context->set_optimizer_event(event);
  gather();
  // Alone and without a cast a rank has nothing to do on the gather stream: the shard is read by the copy-out.
  const bool reads = !GetParam().offload && (GetParam().ranks > 1 || GetParam().cast);
  EXPECT_EQ(!fake_device::races().empty(), reads);
}

INSTANTIATE_TEST_SUITE_P(Cases, StreamsTest,
                         ::testing::Values(Case{1, false}, Case{2, false}, Case{1, true}, Case{2, true},
                                           Case{1, false, true}, Case{2, false, true}, Case{2, true, true}));

}  // namespace
}  // namespace fsdp::engine
