/* SPDX-License-Identifier: MIT */
/*
 * A stand-in for the kernel's uverbs and rdma_rxe, as a preloaded library.
 *
 * libibverbs and a provider open a device, make a CQ and QPs, and map their
 * queues; everything they ask of the kernel for that is answered here, so that
 * the data path of a provider can be measured without RDMA, root or a guest.
 *
 *   open, stat of /dev/infiniband/uverbs0   /dev/null, a character device
 *   ioctl(RDMA_VERBS_IOCTL)                 the methods below; objects get the
 *                                           next free handle
 *   mmap of the device                      a memfd, at the offset that the
 *                                           create command answered
 *   write to the device (the doorbell)      taken whole, nothing done
 *   socket(NETLINK_RDMA)                    refused, so that libibverbs takes
 *                                           its devices from SYSFS_PATH
 *
 * The queues have the geometry that rdma_rxe gives them: a header of 384 bytes,
 * a power of two entries of 128 bytes (CQ), 512 (SQ of one SGE and 64 bytes
 * inline) or 64 (RQ of one SGE). The bench itself plays the device on them.
 */
#define _GNU_SOURCE
#include <rdma/rdma_user_rxe.h>

#include "standin.h"
#include "standin_common.c"

#define MEMORY_BYTES (16u << 20)
#define MAX_QUEUES 128
#define INLINE_BYTES 64

/* The doorbell is the only thing here that the data path reaches. */
static uint64_t doorbells;

struct queue {
	enum standin_queue_kind kind;
	uint32_t handle;
	struct rxe_queue_buf *buf;
};

static struct queue queues[MAX_QUEUES];
static unsigned int nqueues;
static int memory_fd = -1;
static uint8_t *memory;
static size_t memory_used;

/* ---- queue memory ---- */

static int make_memory(void)
{
	if (memory)
		return 0;
	memory = shared_memory("standin-queues", MEMORY_BYTES, &memory_fd);
	return memory ? 0 : -1;
}

static uint32_t log2_ceil(uint32_t value)
{
	uint32_t log = 0;

	while ((1ull << log) < value)
		log++;
	return log;
}

/* As rdma_rxe: one slot always stays free, slots are a power of two. */
static int make_queue(enum standin_queue_kind kind, uint32_t handle,
		      uint32_t want, uint32_t entry_bytes, struct mminfo *out)
{
	uint32_t log_entry = log2_ceil(entry_bytes);
	uint32_t slots = 1u << log2_ceil(want + 1);
	size_t bytes = sizeof(struct rxe_queue_buf) +
		       ((size_t)slots << log_entry);
	struct rxe_queue_buf *buf;

	bytes = (bytes + 4095) & ~(size_t)4095;
	if (make_memory() || nqueues == MAX_QUEUES ||
	    memory_used + bytes > MEMORY_BYTES) {
		errno = ENOMEM;
		return -1;
	}
	buf = (struct rxe_queue_buf *)(memory + memory_used);
	buf->log2_elem_size = log_entry;
	buf->index_mask = slots - 1;
	queues[nqueues++] = (struct queue){ kind, handle, buf };
	*out = (struct mminfo){ .offset = memory_used, .size = bytes };
	memory_used += bytes;
	return 0;
}

EXPORT struct rxe_queue_buf *standin_queue(enum standin_queue_kind kind,
					   uint32_t handle)
{
	for (unsigned int i = nqueues; i-- > 0;)
		if (queues[i].kind == kind &&
		    (!handle || queues[i].handle == handle))
			return queues[i].buf;
	return NULL;
}

EXPORT uint64_t standin_doorbells(void)
{
	return doorbells;
}

/* ---- the ioctl interface ---- */

static const void *input_ptr(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id)
{
	struct ib_uverbs_attr *attr = attr_of(hdr, id);

	if (!attr)
		return NULL;
	if (attr->len <= sizeof(attr->data))
		return &attr->data;
	return (const void *)(uintptr_t)attr->data;
}

static int create_cq(uint32_t handle, uint32_t cqe, uint32_t *got,
		     struct rxe_create_cq_resp *driver)
{
	if (make_queue(STANDIN_CQ, handle, cqe, 128, &driver->mi))
		return -1;
	*got = cqe;
	return 0;
}

static int create_qp(uint32_t handle, struct ib_uverbs_qp_cap *cap, bool srq,
		     struct rxe_create_qp_resp *driver)
{
	uint32_t sge_bytes = cap->max_send_sge * sizeof(struct rxe_sge);
	uint32_t data = sge_bytes > INLINE_BYTES ? sge_bytes : INLINE_BYTES;

	if (!srq &&
	    make_queue(STANDIN_RQ, handle, cap->max_recv_wr,
		       sizeof(struct rxe_recv_wqe) +
			       cap->max_recv_sge * sizeof(struct rxe_sge),
		       &driver->rq_mi))
		return -1;
	if (make_queue(STANDIN_SQ, handle, cap->max_send_wr,
		       sizeof(struct rxe_send_wqe) + data, &driver->sq_mi))
		return -1;
	cap->max_inline_data = data;
	return 0;
}

static int ioctl_create_cq(struct ib_uverbs_ioctl_hdr *hdr)
{
	struct rxe_create_cq_resp driver = {};
	uint32_t handle = next_handle++, got;

	if (create_cq(handle, input_u64(hdr, UVERBS_ATTR_CREATE_CQ_CQE), &got,
		      &driver))
		return -1;
	output_handle(hdr, UVERBS_ATTR_CREATE_CQ_HANDLE, handle);
	output_u32(hdr, UVERBS_ATTR_CREATE_CQ_RESP_CQE, got);
	output(hdr, UVERBS_ATTR_UHW_OUT, &driver, sizeof(driver));
	return 0;
}

static int ioctl_create_qp(struct ib_uverbs_ioctl_hdr *hdr)
{
	const struct ib_uverbs_qp_cap *in =
		input_ptr(hdr, UVERBS_ATTR_CREATE_QP_CAP);
	struct rxe_create_qp_resp driver = {};
	struct ib_uverbs_qp_cap cap;
	uint32_t handle = next_handle++;

	if (!in) {
		errno = EINVAL;
		return -1;
	}
	cap = *in;
	if (create_qp(handle, &cap,
		      attr_of(hdr, UVERBS_ATTR_CREATE_QP_SRQ_HANDLE) != NULL,
		      &driver))
		return -1;
	output_handle(hdr, UVERBS_ATTR_CREATE_QP_HANDLE, handle);
	output(hdr, UVERBS_ATTR_CREATE_QP_RESP_CAP, &cap, sizeof(cap));
	output_u32(hdr, UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, 16 + handle);
	output(hdr, UVERBS_ATTR_UHW_OUT, &driver, sizeof(driver));
	return 0;
}

/* A command of the old write interface, carried by an ioctl. */
static int ioctl_write_command(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t command = input_u64(hdr, UVERBS_ATTR_WRITE_CMD);
	const void *in = input_ptr(hdr, UVERBS_ATTR_CORE_IN);

	say("write command %#x", command);
	if (!in) {
		errno = ENOSPC; /* libibverbs probes with an empty command */
		return -1;
	}
	switch (command) {
	case IB_USER_VERBS_CMD_QUERY_DEVICE: {
		struct ib_uverbs_query_device_resp resp = {
			.max_qp = 1024, .max_qp_wr = 1 << 16, .max_sge = 32,
			.max_cq = 1024, .max_cqe = 1 << 15, .max_mr = 1024,
			.max_pd = 1024, .phys_port_cnt = 1,
		};
		output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
		return 0;
	}
	case IB_USER_VERBS_CMD_FLAG_EXTENDED | IB_USER_VERBS_EX_CMD_QUERY_DEVICE: {
		struct ib_uverbs_ex_query_device_resp resp = {
			.base = { .max_qp = 1024, .max_qp_wr = 1 << 16,
				  .max_sge = 32, .max_cq = 1024,
				  .max_cqe = 1 << 15, .max_mr = 1024,
				  .max_pd = 1024, .phys_port_cnt = 1 },
			.response_length = sizeof(resp),
		};
		output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
		return 0;
	}
	case IB_USER_VERBS_CMD_ALLOC_PD:
		output_u32(hdr, UVERBS_ATTR_CORE_OUT, next_handle++);
		return 0;
	case IB_USER_VERBS_CMD_REG_MR: {
		uint32_t handle = next_handle++;
		struct ib_uverbs_reg_mr_resp resp = {
			.mr_handle = handle,
			.lkey = handle << 8 | 1,
			.rkey = handle << 8 | 1,
		};
		output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
		return 0;
	}
	case IB_USER_VERBS_CMD_CREATE_CQ: {
		const struct ib_uverbs_create_cq *cmd = in;
		struct ib_uverbs_create_cq_resp resp = {
			.cq_handle = next_handle++,
		};
		struct rxe_create_cq_resp driver = {};

		if (create_cq(resp.cq_handle, cmd->cqe, &resp.cqe, &driver))
			return -1;
		output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
		output(hdr, UVERBS_ATTR_UHW_OUT, &driver, sizeof(driver));
		return 0;
	}
	case IB_USER_VERBS_CMD_MODIFY_QP:
	case IB_USER_VERBS_CMD_FLAG_EXTENDED | IB_USER_VERBS_EX_CMD_MODIFY_QP:
	case IB_USER_VERBS_CMD_POST_SEND:
	case IB_USER_VERBS_CMD_DEALLOC_PD:
	case IB_USER_VERBS_CMD_DEREG_MR: {
		uint64_t none[2] = {};

		output(hdr, UVERBS_ATTR_CORE_OUT, none, sizeof(none));
		return 0;
	}
	}
	say("write command %#x: not known here", command);
	return fail(EOPNOTSUPP);
}

static int verbs_ioctl(struct ib_uverbs_ioctl_hdr *hdr)
{
	const uint64_t none[8] = {};

	say("ioctl object %u method %u, %u attributes", hdr->object_id,
	    hdr->method_id, hdr->num_attrs);
	switch (hdr->object_id << 16 | hdr->method_id) {
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_INVOKE_WRITE:
		return ioctl_write_command(hdr);
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_GET_CONTEXT:
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_CONTEXT: {
		uint64_t core_support = IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS;

		output_u32(hdr, UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 1);
		output(hdr, UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT,
		       &core_support, sizeof(core_support));
		return 0;
	}
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_PORT: {
		struct ib_uverbs_query_port_resp_ex resp = {
			.legacy_resp = { .state = 4, .max_mtu = 5,
					 .active_mtu = 3, .link_layer = 2 },
		};

		output(hdr, UVERBS_ATTR_QUERY_PORT_RESP, &resp, sizeof(resp));
		return 0;
	}
	case UVERBS_OBJECT_ASYNC_EVENT << 16 | UVERBS_METHOD_ASYNC_EVENT_ALLOC:
		return quiet_events(hdr, UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE);
	case UVERBS_OBJECT_CQ << 16 | UVERBS_METHOD_CQ_CREATE:
		return ioctl_create_cq(hdr);
	case UVERBS_OBJECT_QP << 16 | UVERBS_METHOD_QP_CREATE:
		return ioctl_create_qp(hdr);
	case UVERBS_OBJECT_CQ << 16 | UVERBS_METHOD_CQ_DESTROY:
		output(hdr, UVERBS_ATTR_DESTROY_CQ_RESP, none, sizeof(none));
		return 0;
	case UVERBS_OBJECT_QP << 16 | UVERBS_METHOD_QP_DESTROY:
		output(hdr, UVERBS_ATTR_DESTROY_QP_RESP, none, sizeof(none));
		return 0;
	case UVERBS_OBJECT_PD << 16 | UVERBS_METHOD_PD_DESTROY:
	case UVERBS_OBJECT_MR << 16 | UVERBS_METHOD_MR_DESTROY:
		return 0;
	}
	say("object %u method %u: not known here", hdr->object_id,
	    hdr->method_id);
	return fail(EOPNOTSUPP);
}

static int device_file(off_t *offset)
{
	(void)offset;
	return memory_fd;
}

EXPORT ssize_t write(int fd, const void *data, size_t bytes)
{
	if (__builtin_expect(fd == device_fd, 1)) {
		doorbells++;
		return bytes;
	}
	return syscall(SYS_write, fd, data, bytes);
}
