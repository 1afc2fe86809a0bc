// The classic wrapper: dtypes, and a user's own reductions.
#include "classic.h"

namespace fsdp::testing {
namespace {

struct ClassicPrecisionThreads : OnRanks {};
struct ClassicHookThreads : OnRanks {};

// --- mixed precision ------------------------------------------------------------------------------------------------

// Both styles do the same casts, so that one is the other's reference (PolicyThreads has the plain one's).
TEST_P(ClassicPrecisionThreads, MixedPrecisionIsThatOfFullyShard) {
  auto rows = uneven(ranks());
  rows.dtype = at::kFloat;
  rows.options.mp_policy = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  Options options;
  options.mixed_precision = {.param_dtype = at::kBFloat16, .reduce_dtype = at::kFloat};
  run_twins(ranks(), rows, Grouping::kChildren, [&](Twin& twin, int) {
    auto net = build(rows);
    auto model = classic(rows, options).wrap(net, Grouping::kChildren);
    torch::optim::SGD ours(twin.net().parameters(), 0.1), theirs(net->parameters(), 0.1);
    for (int step = 0; step < 3; ++step) {
      ours.zero_grad(), theirs.zero_grad();
      const auto batch = twin.samples_here(twin.the_case().batch);
      const auto a = twin.model()(batch), b = model(batch);
      EXPECT_TRUE(a.equal(b));
      a.pow(2).mean().backward();
      b.pow(2).mean().backward();
      ours.step(), theirs.step();
    }
    for (const auto& item : net->named_parameters()) {
      EXPECT_EQ(dtensor(item.value()).to_local().scalar_type(), at::kFloat);
      const auto expected = dtensor(twin.net().named_parameters()[item.key()]).full_tensor();
      EXPECT_LT(difference(dtensor(item.value()).full_tensor(), expected), 1e-5) << item.key();
    }
  });
}

struct Seen : torch::nn::Module {
  Seen() {
    linear = register_module("linear", Linear(4, 4));
    shift = register_buffer("shift", torch::full({4}, 1.0 / 3));
    count = register_buffer("count", torch::zeros({1}, at::kLong));
  }
  at::Tensor forward(const at::Tensor& x) {
    seen = x.scalar_type();
    return linear(x.to(at::kBFloat16)) + shift;
  }
  Linear linear{nullptr};
  at::Tensor shift, count;
  at::ScalarType seen = at::kByte;
};

// Which of a model's inputs are cast, and buffers but for those of ignored modules and of units that are there already.
TEST_P(ClassicPrecisionThreads, InputsAndBuffersAreCast) {
  struct Outer : torch::nn::Module {
    Outer() {
      for (const char* name : {"first", "ignored", "wrapped"}) register_module(name, std::make_shared<Seen>());
    }
    std::shared_ptr<Seen> at(const char* name) { return std::dynamic_pointer_cast<Seen>(named_children()[name]); }
    at::Tensor forward(const at::Tensor& x) {
      seen = x.scalar_type();
      return call(at("first"), x.to(at::kFloat));
    }
    at::ScalarType seen = at::kByte;
  };
  run_ranks(ranks(), [](int) {
    for (const bool root : {true, false}) {
      for (const bool inner : {true, false}) {
        const auto net = std::make_shared<Outer>();
        wrapped(net->at("wrapped"));
        Options options;
        options.auto_wrap_policy = module_wrap_policy<Seen>();
        options.ignored_modules = {net->at("ignored")};
        options.mixed_precision = {.param_dtype = at::kBFloat16,
                                   .buffer_dtype = at::kHalf,
                                   .cast_forward_inputs = inner,
                                   .cast_root_forward_inputs = root};
        const auto model = wrapped(net, options);
        model(torch::ones({2, 4}));
        EXPECT_EQ(net->seen, root || inner ? at::kBFloat16 : at::kFloat);
        EXPECT_EQ(net->at("first")->seen, inner ? at::kBFloat16 : at::kFloat);
        EXPECT_EQ(net->at("first")->shift.scalar_type(), at::kHalf);
        EXPECT_EQ(full_state_dict(model)["first.shift"].scalar_type(), at::kHalf);
        EXPECT_EQ(net->at("first")->count.scalar_type(), at::kLong);
        EXPECT_EQ(net->at("ignored")->shift.scalar_type(), at::kFloat);
        EXPECT_EQ(net->at("wrapped")->shift.scalar_type(), at::kFloat);
      }
    }
  });
}

// The optimizer sees what was reduced.
TEST_P(ClassicPrecisionThreads, GradientsStayInLowPrecision) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    auto c = uneven(ranks());
    c.dtype = at::kFloat;
    auto options = with(strategy);
    options.auto_wrap_policy = module_wrap_policy<Linear>();
    options.mixed_precision = {.param_dtype = at::kBFloat16, .keep_low_precision_grads = true};
    auto upcast = options;
    upcast.mixed_precision.keep_low_precision_grads = false;
    run_ranks(ranks(), [&](int) {
      const auto net = build(c), other = build(c);
      const auto model = wrapped(net, options), reference = wrapped(other, upcast);
      const auto x = c.batch.to(c.dtype).chunk(world_size(), 0)[static_cast<size_t>(rank())];
      for (const auto* each : {&model, &reference}) (*each)(x).pow(2).mean().backward();
      for (size_t i = 0; i < net->parameters().size(); ++i) {
        const auto gradient = net->parameters()[i].grad(), expected = other->parameters()[i].grad();
        EXPECT_EQ(gradient.scalar_type(), at::kBFloat16);
        EXPECT_EQ(expected.scalar_type(), at::kFloat);
        EXPECT_TRUE(dtensor(gradient).full_tensor().to(at::kFloat).equal(dtensor(expected).full_tensor()));
      }
      EXPECT_NEAR(model.clip_grad_norm_(0.01).item<double>(), reference.clip_grad_norm_(0.01).item<double>(), 1e-2);
      torch::optim::SGD(model.parameters(), 0.1).step();
      torch::optim::SGD(reference.parameters(), 0.1).step();
      for (const auto& item : full_state_dict(model)) {
        EXPECT_EQ(item.value().scalar_type(), at::kFloat);
        EXPECT_LT(difference(item.value(), full_state_dict(reference)[item.key()]), 1e-4);
      }
    });
  }
}

// --- a user's own reduction -----------------------------------------------------------------------------------------

TEST_P(ClassicHookThreads, CommHookReducesTheWholeOfAUnit) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kShardGradOp, ShardingStrategy::kNoShard}) {
    run_wrapped(ranks(), uneven(ranks()), by_layer(strategy), [&](Wrapper& model, Net& plain, const at::Tensor& batch) {
      const bool cut = strategy != ShardingStrategy::kNoShard && world_size() > 1;
      int calls = 0;
      // Twice the mean, by a collective of its own.
      model.register_comm_hook([&](const at::Tensor& gradients, const at::Tensor& output) {
        ++calls;
        EXPECT_EQ(output.defined(), cut);
        const auto mean = all_reduce_mean(gradients.mul(2));
        if (!cut) {
          gradients.copy_(mean);
        } else {
          output.copy_(mean.chunk(world_size())[static_cast<size_t>(rank())]);
        }
      });
      EXPECT_THROW(model.register_comm_hook([](const at::Tensor&, const at::Tensor&) {}), InvalidArgument);
      for (int step = 0; step < 2; ++step) {
        plain.zero_grad(), model->zero_grad();
        (loss_of(plain.forward(batch)) * 2).backward();
        loss_of(model(samples_here(batch))).backward();
        expect_equal_gradients(*model, plain);
      }
      EXPECT_EQ(calls, 4);  // two layers
    });
  }
}

TEST_P(ClassicHookThreads, CommHookSeesHalfPrecisionAsItIs) {
  for (auto strategy : {ShardingStrategy::kFullShard, ShardingStrategy::kNoShard}) {
    run_ranks(ranks(), [&](int rank) {
      auto options = with(strategy);
      options.mixed_precision = {.param_dtype = at::kHalf};
      Linear net(torch::nn::LinearOptions(4, 1).bias(false));
      const auto model = wrapped(net, options);
      model.register_comm_hook([&](const at::Tensor& gradients, const at::Tensor& output) {
        EXPECT_TRUE(gradients.narrow(0, 0, 4).eq(rank + 1.0).all().item<bool>()) << gradients;
        (output.defined() ? output : gradients).fill_(0.5);
      });
      model(torch::full({1, 4}, rank + 1.0)).sum().backward();
      EXPECT_TRUE(dtensor(net->weight.grad()).full_tensor().eq(0.5).all().item<bool>());
    });
  }
}

TEST_P(ClassicHookThreads, UnitsInsideAndHybridOnesHaveNoHook) {
  run_wrapped(ranks(), uneven(ranks()), by_layer(), [](Wrapper& model, Net&, const at::Tensor&) {
    const auto hook = [](const at::Tensor&, const at::Tensor&) {};
    const auto inner = fsdp_module(as_mlp(*model).layers[0]);
    EXPECT_THROW(module::register_comm_hook(*inner.state(), hook), InvalidArgument);
    EXPECT_THROW(model.register_comm_hook({}), InvalidArgument);
    if (world_size() == 1) return;
    auto options = with(ShardingStrategy::kHybridShard);
    options.mesh = init_device_mesh(at::kCPU, {1, world_size()}, {"replicate", "shard"});
    EXPECT_THROW(wrapped(Linear(2, 2), options).register_comm_hook(hook), InvalidArgument);
  });
}

FSDP_ON_RANKS(ClassicPrecisionThreads, 1, 2, 3, 4);
FSDP_ON_RANKS(ClassicHookThreads, 1, 2, 3, 4);

}  // namespace
}  // namespace fsdp::testing
