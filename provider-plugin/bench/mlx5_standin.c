/* SPDX-License-Identifier: MIT */
/*
 * A stand-in for the kernel's uverbs and mlx5_ib, as a preloaded library: the
 * counterpart of standin.c for ConnectX.
 *
 *   open, stat of /dev/infiniband/uverbs0   /dev/null, a character device
 *   ioctl(RDMA_VERBS_IOCTL)                 the methods below; objects get the
 *                                           next free handle, and the next
 *                                           number of their kind
 *   mmap of the device                      pages of registers: ordinary
 *                                           memory, which is also mapped here
 *   socket(NETLINK_RDMA)                    refused, so that libibverbs takes
 *                                           its devices from SYSFS_PATH
 *
 * Queues and doorbell records are the process's own memory; what a provider
 * says of them when it makes an object is kept, so that a program can read
 * them as the device would.
 *
 * RINGVERBS_MLX5_INLINE_HEADERS  if set, work requests of raw packets carry the
 *                                headers of Ethernet
 *
 * Registers are given as mlx5_ib does: a provider that can allocate UARs gets
 * none with the context, another one gets those it asked for, of which the
 * last are for one queue pair each and number 0 is for doorbells only.
 */
#define _GNU_SOURCE
#include "mlx5_standin.h"
#include "standin_common.c"
#include "mlx5_empty.c"

#include <rdma/mlx5-abi.h>
#include <rdma/mlx5_user_ioctl_cmds.h>

#define PAGE 4096
#define PAGES 256
/* Pages that are allocated one by one come behind those of the context. */
#define FIRST_ALLOCATED 64
#define MAX_OBJECTS 2048
#define REGISTER_BYTES (2 * MLX5_HALF)
#define REGISTERS_AT 0x800
/* A UAR has two of them for queue pairs; the driver counts four. */
#define PER_UAR 2
#define COUNTED_PER_UAR 4

static struct mlx5_object objects[MAX_OBJECTS];
static unsigned int nobjects;
/* Those that were destroyed, of which the place has not been taken. */
static struct mlx5_object *spare[MAX_OBJECTS];
static unsigned int nspare;
static uint32_t next_mr = 1;
static uint32_t next_number[] = { [MLX5_CQ] = 0x400, [MLX5_QP] = 0x48,
				  [MLX5_SRQ] = 0x600 };
static int registers_fd = -1;
static uint8_t *registers;
static uint32_t context_registers, exclusive_registers;
static uint32_t next_page = FIRST_ALLOCATED;
/* A completion channel's two ends: the provider's and the device's. */
static struct {
	int reads, writes;
} channels[8];
static unsigned int nchannels;

static int make_registers(void)
{
	if (registers)
		return 0;
	registers = shared_memory("standin-registers", PAGES * PAGE,
				  &registers_fd);
	return registers ? 0 : -1;
}

/* ---- attributes ---- */

/* Copies an input, as much of it as there is; the rest is zero. */
static bool input(struct ib_uverbs_ioctl_hdr *hdr, uint16_t id, void *to,
		  size_t bytes)
{
	struct ib_uverbs_attr *attr = attr_of(hdr, id);
	size_t fits;

	memset(to, 0, bytes);
	if (!attr)
		return false;
	fits = bytes < attr->len ? bytes : attr->len;
	/* Inputs of up to eight bytes are in the attribute itself. */
	memcpy(to,
	       attr->len <= sizeof(attr->data) ?
		       (const void *)&attr->data :
		       (const void *)(uintptr_t)attr->data,
	       fits);
	return true;
}

/* ---- objects ---- */

EXPORT const struct mlx5_object *mlx5_object(enum mlx5_kind kind,
					     uint32_t handle)
{
	for (unsigned int i = nobjects; i-- > 0;)
		if (objects[i].kind == kind &&
		    (!handle || objects[i].handle == handle))
			return &objects[i];
	return NULL;
}

static struct mlx5_object *new_object(enum mlx5_kind kind, uint64_t buffer,
				      uint64_t records)
{
	struct mlx5_object *object;

	if (!buffer || !records)
		return NULL;
	/* What is destroyed stays known while there is room. */
	if (nobjects < MAX_OBJECTS)
		object = &objects[nobjects++];
	else if (nspare)
		object = spare[--nspare];
	else
		return NULL;
	*object = (struct mlx5_object){
		.kind = kind,
		.handle = next_handle++,
		.number = next_number[kind]++,
		.buffer = (uint8_t *)(uintptr_t)buffer,
		.records = (volatile uint32_t *)(uintptr_t)records,
		.registers = registers,
	};
	return object;
}

static void destroyed(struct ib_uverbs_ioctl_hdr *hdr, enum mlx5_kind kind,
		      uint16_t handle)
{
	const struct mlx5_object *object =
		mlx5_object(kind, input_u64(hdr, handle));

	if (object && nspare < MAX_OBJECTS)
		spare[nspare++] = (struct mlx5_object *)object;
}

static uint32_t power_of_two(uint32_t value)
{
	uint32_t power = 1;

	while (power < value)
		power <<= 1;
	return power;
}

static int get_context(struct ib_uverbs_ioctl_hdr *hdr)
{
	struct mlx5_ib_alloc_ucontext_req_v2 req;
	struct mlx5_ib_alloc_ucontext_resp resp = {
		.qp_tab_size = 1 << 16,
		.bf_reg_size = REGISTER_BYTES,
		.cache_line_size = 64,
		.max_sq_desc_sz = 1024,
		.max_rq_desc_sz = 512,
		.max_send_wqebb = 1 << 15,
		.max_recv_wr = 1 << 15,
		.max_srq_recv_wr = 1 << 15,
		.num_ports = 2,
		.response_length = sizeof(resp),
		.cqe_version = 1,
		.cmds_supp_uhw = MLX5_USER_CMDS_SUPP_UHW_CREATE_AH,
		.eth_min_inline = getenv("RINGVERBS_MLX5_INLINE_HEADERS") ?
					  MLX5_USER_INLINE_MODE_L2 :
					  MLX5_USER_INLINE_MODE_NONE,
		.log_uar_size = 12,
		.num_uars_per_page = 1,
		.num_dyn_bfregs = 512,
	};
	uint64_t support = IB_UVERBS_CORE_SUPPORT_OPTIONAL_MR_ACCESS;

	if (make_registers())
		return -1;
	if (!input(hdr, UVERBS_ATTR_UHW_IN, &req, sizeof(req)))
		return fail(EINVAL);
	/* No DevX, as on a device whose firmware has none. */
	if (req.flags & MLX5_IB_ALLOC_UCTX_DEVX)
		return fail(EPERM);
	if (!(req.lib_caps & MLX5_LIB_CAP_DYN_UAR)) {
		if (req.total_num_bfregs > FIRST_ALLOCATED * PER_UAR)
			return fail(ENOMEM);
		resp.tot_bfregs = context_registers = req.total_num_bfregs;
		exclusive_registers = req.num_low_latency_bfregs;
	}
	output_u32(hdr, UVERBS_ATTR_GET_CONTEXT_NUM_COMP_VECTORS, 1);
	output(hdr, UVERBS_ATTR_GET_CONTEXT_CORE_SUPPORT, &support,
	       sizeof(support));
	output(hdr, UVERBS_ATTR_UHW_OUT, &resp, sizeof(resp));
	return 0;
}

static int alloc_uar(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint64_t offset;

	if (next_page == PAGES)
		return fail(ENOMEM);
	offset = (uint64_t)next_page * PAGE;
	output_handle(hdr, MLX5_IB_ATTR_UAR_OBJ_ALLOC_HANDLE, next_handle++);
	output(hdr, MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_OFFSET, &offset,
	       sizeof(offset));
	output_u32(hdr, MLX5_IB_ATTR_UAR_OBJ_ALLOC_MMAP_LENGTH, PAGE);
	output_u32(hdr, MLX5_IB_ATTR_UAR_OBJ_ALLOC_PAGE_ID, next_page++);
	return 0;
}

static int create_channel(struct ib_uverbs_ioctl_hdr *hdr)
{
	int ends[2];

	if (nchannels == sizeof(channels) / sizeof(channels[0]))
		return fail(ENOMEM);
	if (pipe2(ends, O_CLOEXEC))
		return -1;
	channels[nchannels].reads = ends[0];
	channels[nchannels++].writes = ends[1];
	output_u32(hdr, UVERBS_ATTR_CORE_OUT, ends[0]);
	return 0;
}

/* Where the events of a completion queue that is made are to be written. */
static int channel_of(struct ib_uverbs_ioctl_hdr *hdr)
{
	struct ib_uverbs_attr *attr =
		attr_of(hdr, UVERBS_ATTR_CREATE_CQ_COMP_CHANNEL);

	for (unsigned int i = 0; attr && i < nchannels; i++)
		if (channels[i].reads == (int)attr->data_s64)
			return channels[i].writes;
	return -1;
}

static int create_cq(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t cqe = input_u64(hdr, UVERBS_ATTR_CREATE_CQ_CQE);
	struct mlx5_ib_create_cq cmd;
	struct mlx5_ib_create_cq_resp resp = {};
	struct mlx5_object *cq;

	input(hdr, UVERBS_ATTR_UHW_IN, &cmd, sizeof(cmd));
	cq = new_object(MLX5_CQ, cmd.buf_addr, cmd.db_addr);
	if (!cq || (cmd.cqe_size != 64 && cmd.cqe_size != 128))
		return fail(EINVAL);
	cq->cqe_bytes = cmd.cqe_size;
	cq->compresses = cmd.cqe_comp_en;
	cq->channel = channel_of(hdr);
	cq->user_handle = input_u64(hdr, UVERBS_ATTR_CREATE_CQ_USER_HANDLE);
	cq->entries = power_of_two(cqe + 1);
	cq->flags = cmd.flags;
	if (cmd.flags & MLX5_IB_CREATE_CQ_FLAGS_UAR_PAGE_INDEX)
		cq->registers = registers + (cmd.uar_page_index % PAGES) * PAGE;
	resp.cqn = cq->number;
	output_handle(hdr, UVERBS_ATTR_CREATE_CQ_HANDLE, cq->handle);
	output_u32(hdr, UVERBS_ATTR_CREATE_CQ_RESP_CQE, cq->entries - 1);
	output(hdr, UVERBS_ATTR_UHW_OUT, &resp, sizeof(resp));
	return 0;
}

/* Registers that queue pairs have. */
static uint32_t given;

/* The driver's number of the register for the next queue pair. */
static uint32_t next_register(void)
{
	uint32_t first = context_registers - exclusive_registers;
	uint32_t n = given++, number;

	number = n < exclusive_registers ?
			 first + n :
			 1 + (n - exclusive_registers) % (first - 1);
	return number / PER_UAR * COUNTED_PER_UAR + number % PER_UAR;
}

static int create_qp(struct ib_uverbs_ioctl_hdr *hdr)
{
	struct mlx5_ib_create_qp cmd;
	struct mlx5_ib_create_qp_resp resp = {};
	struct ib_uverbs_qp_cap cap;
	struct ib_uverbs_attr *underlay;
	struct mlx5_object *qp;
	uint32_t page, within = 0;

	input(hdr, UVERBS_ATTR_CREATE_QP_CAP, &cap, sizeof(cap));
	input(hdr, UVERBS_ATTR_UHW_IN, &cmd, sizeof(cmd));
	qp = new_object(MLX5_QP, cmd.buf_addr, cmd.db_addr);
	if (!qp)
		return fail(EINVAL);
	qp->send_blocks = cmd.sq_wqe_count;
	qp->recv_entries = cmd.rq_wqe_count;
	qp->recv_shift = cmd.rq_wqe_shift;
	underlay = attr_of(hdr, UVERBS_ATTR_CREATE_QP_SOURCE_QPN);
	if (underlay && underlay->data != 0x123456)
		return fail(EINVAL);
	qp->sends = underlay || input_u64(hdr, UVERBS_ATTR_CREATE_QP_TYPE) ==
					    IB_UVERBS_QPT_RAW_PACKET ?
			    (uint8_t *)(uintptr_t)cmd.sq_buf_addr :
			    qp->buffer + ((size_t)qp->recv_entries
					  << qp->recv_shift);
	qp->user_index = cmd.uidx;
	qp->flags = cmd.flags;
	if (cmd.flags & MLX5_QP_FLAG_UAR_PAGE_INDEX) {
		static uint8_t users[PAGES];

		/* Which of the page's two is not said; a provider gives them
		 * out in turn. */
		page = cmd.bfreg_index;
		within = users[page % PAGES]++ % PER_UAR;
	} else if (context_registers > exclusive_registers + 1) {
		resp.bfreg_index = next_register();
		page = resp.bfreg_index / COUNTED_PER_UAR;
		within = resp.bfreg_index % COUNTED_PER_UAR;
	} else {
		return fail(EINVAL);
	}
	if (page >= PAGES)
		return fail(EINVAL);
	qp->registers = registers + page * PAGE;
	qp->blue_flame = qp->registers + REGISTERS_AT + within * REGISTER_BYTES;
	output_handle(hdr, UVERBS_ATTR_CREATE_QP_HANDLE, qp->handle);
	output(hdr, UVERBS_ATTR_CREATE_QP_RESP_CAP, &cap, sizeof(cap));
	output_u32(hdr, UVERBS_ATTR_CREATE_QP_RESP_QP_NUM, qp->number);
	output(hdr, UVERBS_ATTR_UHW_OUT, &resp, sizeof(resp));
	return 0;
}

static int create_srq(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t max_wr = input_u64(hdr, UVERBS_ATTR_CREATE_SRQ_MAX_WR);
	uint32_t max_sge = input_u64(hdr, UVERBS_ATTR_CREATE_SRQ_MAX_SGE);
	struct mlx5_ib_create_srq cmd;
	struct mlx5_ib_create_srq_resp resp = {};
	struct mlx5_object *srq;

	input(hdr, UVERBS_ATTR_UHW_IN, &cmd, sizeof(cmd));
	srq = new_object(MLX5_SRQ, cmd.buf_addr, cmd.db_addr);
	if (!srq)
		return fail(EINVAL);
	/* As the driver works out the size of the queue. */
	srq->entries = power_of_two(max_wr + 1);
	srq->user_index = cmd.uidx;
	srq->srq_shift = __builtin_ctz(power_of_two(16 + max_sge * 16));
	if (srq->srq_shift < 5)
		srq->srq_shift = 5;
	resp.srqn = srq->number;
	output_handle(hdr, UVERBS_ATTR_CREATE_SRQ_HANDLE, srq->handle);
	output_u32(hdr, UVERBS_ATTR_CREATE_SRQ_RESP_MAX_WR, max_wr);
	output_u32(hdr, UVERBS_ATTR_CREATE_SRQ_RESP_MAX_SGE, max_sge);
	output_u32(hdr, UVERBS_ATTR_CREATE_SRQ_RESP_SRQ_NUM, srq->number);
	output(hdr, UVERBS_ATTR_UHW_OUT, &resp, sizeof(resp));
	return 0;
}

static int create_ah(struct ib_uverbs_ioctl_hdr *hdr)
{
	struct ib_uverbs_create_ah_resp resp = { .ah_handle = next_handle++ };
	struct mlx5_ib_create_ah_resp driver = {
		.response_length = sizeof(driver),
		.dmac = { 0x02, 0x11, 0x22, 0x33, 0x44, 0x55 },
	};

	output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
	output(hdr, UVERBS_ATTR_UHW_OUT, &driver, sizeof(driver));
	return 0;
}

/* ---- commands ---- */

/* A command of the old write interface, carried by an ioctl. */
static int write_command(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t command = input_u64(hdr, UVERBS_ATTR_WRITE_CMD);
	struct ib_uverbs_ex_query_device_resp device = {
		.base = { .max_qp = 1024, .max_qp_wr = 1 << 15, .max_sge = 30,
			  .max_cq = 1024, .max_cqe = 1 << 15, .max_mr = 1024,
			  .max_pd = 1024, .max_ah = 1024, .max_srq = 1024,
			  .max_srq_wr = 1 << 15, .max_srq_sge = 31,
			  .device_cap_flags = IB_UVERBS_DEVICE_RAW_IP_CSUM |
					      IB_UVERBS_DEVICE_UD_IP_CSUM,
			  .atomic_cap = 1, .phys_port_cnt = 2 },
		.response_length = sizeof(device),
	};

	say("write command %#x", command);
	if (!attr_of(hdr, UVERBS_ATTR_CORE_IN))
		return fail(ENOSPC); /* libibverbs probes with an empty one */
	switch (command) {
	case IB_USER_VERBS_CMD_QUERY_DEVICE:
		output(hdr, UVERBS_ATTR_CORE_OUT, &device.base,
		       sizeof(device.base));
		return 0;
	case IB_USER_VERBS_CMD_FLAG_EXTENDED | IB_USER_VERBS_EX_CMD_QUERY_DEVICE:
		output(hdr, UVERBS_ATTR_CORE_OUT, &device, sizeof(device));
		return 0;
	case IB_USER_VERBS_CMD_ALLOC_PD: {
		struct mlx5_ib_alloc_pd_resp driver = { .pdn = 0x11 };

		output_u32(hdr, UVERBS_ATTR_CORE_OUT, next_handle++);
		output(hdr, UVERBS_ATTR_UHW_OUT, &driver, sizeof(driver));
		return 0;
	}
	case IB_USER_VERBS_CMD_REG_MR: {
		uint32_t mr = next_mr++;
		struct ib_uverbs_reg_mr_resp resp = {
			.mr_handle = next_handle++,
			.lkey = 0xabc00 | mr,
			.rkey = 0xabc00 | mr,
		};

		output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
		return 0;
	}
	case IB_USER_VERBS_CMD_ALLOC_MW: {
		uint32_t mr = next_mr++;
		struct ib_uverbs_alloc_mw_resp resp = {
			.mw_handle = next_handle++,
			.rkey = 0xabc00 | mr,
		};

		output(hdr, UVERBS_ATTR_CORE_OUT, &resp, sizeof(resp));
		return 0;
	}
	case IB_USER_VERBS_CMD_CREATE_COMP_CHANNEL:
		return create_channel(hdr);
	case IB_USER_VERBS_CMD_OPEN_XRCD:
		output_u32(hdr, UVERBS_ATTR_CORE_OUT, next_handle++);
		return 0;
	case IB_USER_VERBS_CMD_CREATE_AH:
		return create_ah(hdr);
	case IB_USER_VERBS_CMD_DEALLOC_PD:
	case IB_USER_VERBS_CMD_DEREG_MR:
		return 0;
	case IB_USER_VERBS_CMD_MODIFY_QP:
	case IB_USER_VERBS_CMD_FLAG_EXTENDED | IB_USER_VERBS_EX_CMD_MODIFY_QP: {
		uint64_t none[2] = {};

		output(hdr, UVERBS_ATTR_CORE_OUT, none, sizeof(none));
		return 0;
	}
	}
	say("write command %#x: not known here", command);
	return fail(EOPNOTSUPP);
}

static int query_port(struct ib_uverbs_ioctl_hdr *hdr)
{
	bool ethernet = input_u64(hdr, UVERBS_ATTR_QUERY_PORT_PORT_NUM) ==
			MLX5_PORT_ETHERNET;
	struct ib_uverbs_query_port_resp_ex resp = {
		.legacy_resp = { .state = 4, .max_mtu = 5, .active_mtu = 3,
				 .gid_tbl_len = 4, .lid = 7,
				 .link_layer = ethernet ? 2 : 1 },
	};

	output(hdr, UVERBS_ATTR_QUERY_PORT_RESP, &resp, sizeof(resp));
	return 0;
}

static int query_gid(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t port = input_u64(hdr, UVERBS_ATTR_QUERY_GID_ENTRY_PORT);
	uint32_t index = input_u64(hdr, UVERBS_ATTR_QUERY_GID_ENTRY_GID_INDEX);
	struct ib_uverbs_gid_entry gid = {
		.gid = { 0x80fe, 0x0100 + index },
		.gid_index = index,
		.port_num = port,
		.gid_type = port == MLX5_PORT_INFINIBAND ? IB_UVERBS_GID_TYPE_IB :
			    index == MLX5_GID_ROCE_V1 ?
				   IB_UVERBS_GID_TYPE_ROCE_V1 :
				   IB_UVERBS_GID_TYPE_ROCE_V2,
		.netdev_ifindex = port == MLX5_PORT_ETHERNET,
	};

	output(hdr, UVERBS_ATTR_QUERY_GID_ENTRY_RESP_ENTRY, &gid, sizeof(gid));
	return 0;
}

/* The first commands that made objects of DevX. */
static struct {
	uint32_t bytes;
	uint8_t input[512];
} commands[32];
static unsigned int ncommands;

EXPORT const uint8_t *mlx5_command(unsigned int index, uint32_t *bytes)
{
	if (index >= ncommands)
		return NULL;
	*bytes = commands[index].bytes;
	return commands[index].input;
}

/* An object of DevX: a number that no other has. */
static int create_object(struct ib_uverbs_ioctl_hdr *hdr)
{
	struct ib_uverbs_attr *in = attr_of(hdr, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN);
	static uint32_t number = 0x1234;

	if (in && ncommands < sizeof(commands) / sizeof(commands[0])) {
		input(hdr, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_IN,
		      commands[ncommands].input, sizeof(commands[0].input));
		commands[ncommands++].bytes = in->len;
	}
	uint32_t answer[8] = { [2] = htobe32(number), [4] = htobe32(number) };

	number++;
	output_handle(hdr, MLX5_IB_ATTR_DEVX_OBJ_CREATE_HANDLE, next_handle++);
	output(hdr, MLX5_IB_ATTR_DEVX_OBJ_CREATE_CMD_OUT, answer,
	       sizeof(answer));
	return 0;
}

/* Groups of QUERY_HCA_CAP, with what is current. */
#define GENERAL 0x01
#define CRYPTO 0x35

/* Signatures and encryption of memory keys, and objects of encryption. */
static int query_capabilities(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint32_t request[4] = {}, answer[4 + 1024] = {}, *caps = answer + 4;

	if (!input(hdr, MLX5_IB_ATTR_DEVX_OTHER_CMD_IN, request, sizeof(request)))
		return fail(EINVAL);
	switch (be32toh(request[1]) & 0xffff) {
	case GENERAL:
		caps[0x28 / 4] = htobe32(1 << 23 | 1 << 24);
		caps[0x3c / 4] = htobe32(1 << 15);
		caps[0x40 / 4] = htobe32(1 << 8);
		caps[0x7c / 4] = htobe32(3 << 13);
		caps[0x84 / 4] = htobe32(1 << 12 | 1u << 31);
		caps[0x8c / 4] = htobe32(1 << 22);
		caps[0x90 / 4] = htobe32(1u << 31);
		break;
	case CRYPTO:
		/* Logins, but no keys that need one. */
		caps[0] = htobe32(1u << 31);
		caps[1] = htobe32(4 << 16);
		break;
	default:
		return fail(EOPNOTSUPP);
	}
	output(hdr, MLX5_IB_ATTR_DEVX_OTHER_CMD_OUT, answer, sizeof(answer));
	return 0;
}

static int verbs_ioctl(struct ib_uverbs_ioctl_hdr *hdr)
{
	uint64_t none[2] = {};

	say("ioctl object %#x method %#x, %u attributes", hdr->object_id,
	    hdr->method_id, hdr->num_attrs);
	switch ((uint32_t)hdr->object_id << 16 | hdr->method_id) {
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_INVOKE_WRITE:
		return write_command(hdr);
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_GET_CONTEXT:
		return get_context(hdr);
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_PORT:
		return query_port(hdr);
	case UVERBS_OBJECT_DEVICE << 16 | UVERBS_METHOD_QUERY_GID_ENTRY:
		return query_gid(hdr);
	case UVERBS_OBJECT_ASYNC_EVENT << 16 | UVERBS_METHOD_ASYNC_EVENT_ALLOC:
		return quiet_events(hdr, UVERBS_ATTR_ASYNC_EVENT_ALLOC_FD_HANDLE);
	case UVERBS_OBJECT_CQ << 16 | UVERBS_METHOD_CQ_CREATE:
		return create_cq(hdr);
	case UVERBS_OBJECT_QP << 16 | UVERBS_METHOD_QP_CREATE:
		return create_qp(hdr);
	case UVERBS_OBJECT_SRQ << 16 | UVERBS_METHOD_SRQ_CREATE:
		return create_srq(hdr);
	case (uint32_t)MLX5_IB_OBJECT_UAR << 16 | MLX5_IB_METHOD_UAR_OBJ_ALLOC:
		return alloc_uar(hdr);
	case (uint32_t)MLX5_IB_OBJECT_DEVX_OBJ << 16 |
		MLX5_IB_METHOD_DEVX_OBJ_CREATE:
		return create_object(hdr);
	case (uint32_t)MLX5_IB_OBJECT_DEVX << 16 | MLX5_IB_METHOD_DEVX_OTHER:
		return query_capabilities(hdr);
	case UVERBS_OBJECT_CQ << 16 | UVERBS_METHOD_CQ_DESTROY:
		destroyed(hdr, MLX5_CQ, UVERBS_ATTR_DESTROY_CQ_HANDLE);
		output(hdr, UVERBS_ATTR_DESTROY_CQ_RESP, none, sizeof(none));
		return 0;
	case UVERBS_OBJECT_QP << 16 | UVERBS_METHOD_QP_DESTROY:
		/* Its register is the next one's, if it was the newest. */
		given -= given > 0;
		destroyed(hdr, MLX5_QP, UVERBS_ATTR_DESTROY_QP_HANDLE);
		output(hdr, UVERBS_ATTR_DESTROY_QP_RESP, none, sizeof(none));
		return 0;
	case UVERBS_OBJECT_SRQ << 16 | UVERBS_METHOD_SRQ_DESTROY:
		destroyed(hdr, MLX5_SRQ, UVERBS_ATTR_DESTROY_SRQ_HANDLE);
		output(hdr, UVERBS_ATTR_DESTROY_SRQ_RESP, none, sizeof(none));
		return 0;
	case UVERBS_OBJECT_PD << 16 | UVERBS_METHOD_PD_DESTROY:
	case UVERBS_OBJECT_MR << 16 | UVERBS_METHOD_MR_DESTROY:
		return 0;
	}
	say("object %#x method %#x: not known here", hdr->object_id,
	    hdr->method_id);
	return fail(EOPNOTSUPP);
}

static int device_file(off_t *offset)
{
	/* Above the page's number is how it is to be cached. */
	*offset &= PAGES * PAGE - 1;
	return registers_fd;
}
