/* SPDX-License-Identifier: MIT */
#define _GNU_SOURCE
#include "mlx5_device.h"

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <rdma/ib_user_verbs.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void die(const char *fmt, ...)
{
	va_list args;

	fprintf(stderr, "mlx5: ");
	va_start(args, fmt);
	vfprintf(stderr, fmt, args);
	va_end(args);
	fputc('\n', stderr);
	exit(1);
}

static mlx5_object_fn find;

static const struct mlx5_object *object(enum mlx5_kind kind, uint32_t handle)
{
	const struct mlx5_object *object = find(kind, handle);

	if (!object)
		die("the provider made no object of kind %d with handle %u",
		    kind, handle);
	return object;
}

struct ibv_context *device_open(void)
{
	struct ibv_device **list;
	struct ibv_context *context;
	int n;

	find = (mlx5_object_fn)(uintptr_t)dlsym(RTLD_DEFAULT, "mlx5_object");
	if (!find)
		die("preload mlx5_standin.so (LD_PRELOAD)");
	list = ibv_get_device_list(&n);
	if (!list || n < 1)
		die("no device: SYSFS_PATH must name the stand-in's tree");
	context = ibv_open_device(list[0]);
	if (!context)
		die("ibv_open_device: %s", strerror(errno));
	ibv_free_device_list(list);
	return context;
}

const char *device_provider(struct ibv_context *context)
{
	Dl_info info;

	if (!dladdr((void *)(uintptr_t)context->ops.poll_cq, &info))
		die("poll_cq is in no loaded file");
	return info.dli_fname;
}

void *device_function(struct ibv_context *context, const char *name)
{
	const char *file = device_provider(context);
	void *provider = dlopen(file, RTLD_NOW | RTLD_NOLOAD);
	void *function = provider ? dlsym(provider, name) : NULL;

	if (!function)
		die("%s has no %s", file, name);
	return function;
}

/* ---- completions ---- */

struct device_cq device_cq(struct ibv_cq *cq)
{
	return (struct device_cq){ .object = object(MLX5_CQ, cq->handle) };
}

/* The fields of an entry: the last 64 bytes. */
static struct mlx5_cqe64 *entry_at(const struct device_cq *cq, uint32_t index)
{
	size_t slot = index & (cq->object->entries - 1);

	return (struct mlx5_cqe64 *)(cq->object->buffer +
				     (slot + 1) * cq->object->cqe_bytes) - 1;
}

void device_complete(struct device_cq *cq, struct mlx5_cqe64 cqe)
{
	uint32_t log2 = __builtin_ctz(cq->object->entries);
	struct mlx5_cqe64 *to = entry_at(cq, cq->written);
	uint8_t owner = (cqe.op_own & ~1) | ((cq->written >> log2) & 1);

	cqe.op_own = to->op_own;
	*to = cqe;
	__atomic_store_n(&to->op_own, owner, __ATOMIC_RELEASE);
	cq->written++;
}

void device_complete_wide(struct device_cq *cq, const uint8_t *before,
			  struct mlx5_cqe64 cqe)
{
	if (cq->object->cqe_bytes != 128)
		die("an entry of %u bytes has none before its fields",
		    cq->object->cqe_bytes);
	memcpy(entry_at(cq, cq->written) - 1, before, 64);
	device_complete(cq, cqe);
}

/* What is told of one in an array of eight. */
struct mini {
	uint16_t slot; /* of those sent; a hash, of those received */
	uint8_t opcode, reserved;
	uint32_t bytes;
};

void device_complete_together(struct device_cq *cq,
			      const struct mlx5_cqe64 *cqes,
			      unsigned int count)
{
	uint32_t first = cq->written;
	struct mlx5_cqe64 title = cqes[0];

	for (unsigned int i = 0; i < count; i++) {
		struct mini mini = {
			.slot = cqes[i].wqe_counter,
			.opcode = be32toh(cqes[i].sop_drop_qpn) >> 24,
			.bytes = cqes[i].byte_cnt,
		};
		/* The first array is in the second place, each other in the
		 * place of the first that it tells. */
		uint32_t at = first + (i < 8 ? 1 : i / 8 * 8);

		memcpy((uint8_t *)entry_at(cq, at) + i % 8 * 8, &mini, 8);
	}
	/* The title is written last. */
	title.byte_cnt = htobe32(count);
	title.op_own |= 3 << 2;
	device_complete(cq, title);
	cq->written = first + count;
}

void device_event(const struct device_cq *cq)
{
	struct ib_uverbs_comp_event_desc event = {
		.cq_handle = cq->object->user_handle,
	};

	if (write(cq->object->channel, &event, sizeof(event)) !=
	    sizeof(event))
		die("no event: %s", strerror(errno));
}

struct mlx5_cqe64 device_sent(const struct mlx5_object *qp, uint32_t index)
{
	const struct mlx5_wqe_ctrl_seg *control =
		(const void *)device_send_block(qp, index);
	uint8_t opcode = be32toh(control->opmod_idx_opcode);
	struct mlx5_cqe64 cqe = {
		.srqn_uidx = htobe32(qp->user_index),
		.byte_cnt = htobe32(8),
		.sop_drop_qpn = htobe32((uint32_t)opcode << 24 | qp->number),
		.wqe_counter = htobe16(index),
		.timestamp = htobe64(0x1000 + index),
		.op_own = MLX5_CQE_REQ << 4,
	};

	return cqe;
}

struct mlx5_cqe64 device_received(const struct mlx5_object *qp, uint16_t slot,
				  uint32_t bytes)
{
	struct mlx5_cqe64 cqe = {
		.flags_rqpn = htobe32(0x000777),
		.srqn_uidx = htobe32(qp->user_index),
		.byte_cnt = htobe32(bytes),
		.sop_drop_qpn = htobe32(qp->number),
		.wqe_counter = htobe16(slot),
		.timestamp = htobe64(0x2000 + slot),
		.op_own = MLX5_CQE_RESP_SEND << 4,
	};

	return cqe;
}

/* ---- queue pairs ---- */

const struct mlx5_object *device_qp(struct ibv_qp *qp)
{
	return object(MLX5_QP, qp->handle);
}

const struct mlx5_object *device_newest_qp(void)
{
	return object(MLX5_QP, 0);
}

const struct mlx5_object *device_srq(struct ibv_srq *srq)
{
	return object(MLX5_SRQ, srq->handle);
}

uint8_t *device_send_block(const struct mlx5_object *qp, uint32_t index)
{
	return qp->sends + (size_t)(index & (qp->send_blocks - 1)) * BLOCK;
}

uint8_t *device_recv_entry(const struct mlx5_object *qp, uint32_t index)
{
	return qp->buffer +
	       ((size_t)(index & (qp->recv_entries - 1)) << qp->recv_shift);
}

uint8_t *device_shared_entry(const struct mlx5_object *srq, uint16_t slot)
{
	return srq->buffer +
	       ((size_t)(slot & (srq->entries - 1)) << srq->srq_shift);
}

uint16_t device_shared_next(const struct mlx5_object *srq, uint16_t slot)
{
	const struct mlx5_wqe_srq_next_seg *next =
		(const void *)device_shared_entry(srq, slot);

	return be16toh(next->next_wqe_index) & (srq->entries - 1);
}

void device_ready(struct ibv_qp *qp, uint8_t port)
{
	static const enum ibv_qp_state path[] = { IBV_QPS_INIT, IBV_QPS_RTR,
						  IBV_QPS_RTS };

	for (unsigned int i = 0; i < 3; i++) {
		struct ibv_qp_attr attr = { .qp_state = path[i],
					    .port_num = port };
		int mask = IBV_QP_STATE |
			   (i == 0 && port ? IBV_QP_PORT : 0);
		int err = ibv_modify_qp(qp, &attr, mask);

		if (err)
			die("ibv_modify_qp to state %d: %s", path[i],
			    strerror(err));
	}
}
