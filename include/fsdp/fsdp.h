#pragma once
/// All of libfsdp's C++ interface.
#include <fsdp/checkpoint.h>
#include <fsdp/clip_grad.h>
#include <fsdp/custom_comm.h>
#include <fsdp/device_mesh.h>
#include <fsdp/distributed.h>
#include <fsdp/dtensor.h>
#include <fsdp/error.h>
#include <fsdp/fully_shard.h>
#include <fsdp/fully_sharded_data_parallel.h>
#include <fsdp/grad_scaler.h>
#include <fsdp/optim.h>
#include <fsdp/tensor_extension.h>
#include <fsdp/version.h>
