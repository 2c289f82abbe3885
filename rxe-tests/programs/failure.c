/* SPDX-License-Identifier: MIT */
/*
 * The device fails while a program has a connection, and objects of mlx5dv, in use.
 * Prints "ready", goes on until SIGUSR1, which comes after the device has recovered,
 * and prints the result of each call from then on: rdma-core's libmlx5 and another
 * library in its place must print the same.
 * usage: failure
 */
#include "common.h"
#include <endian.h>
#include <fcntl.h>
#include <infiniband/mlx5dv.h>

#define QUERY_HCA_CAP 0x100

static struct pair p;
static volatile sig_atomic_t recovered;

static void on_signal(int signal)
{
	(void)signal;
	recovered = 1;
}

/* Prints an errno, as a verb returns or sets it. */
static void result(const char *call, int rc)
{
	printf("%s: %d\n", call, rc < 0 ? errno : rc);
}

static void object(const char *call, const void *made)
{
	printf("%s: %d\n", call, made ? 0 : errno);
}

/* Opens the device with DevX, if its driver has that. */
static struct ibv_context *open_with_devx(void)
{
	struct mlx5dv_context_attr attr = {.flags = MLX5DV_CONTEXT_FLAGS_DEVX};
	struct ibv_context *plain = open_device(), *ctx;

	ctx = mlx5dv_open_device(plain->device, &attr);
	if (!ctx)
		return plain;
	OK(ibv_close_device(plain));
	return ctx;
}

/* Posts a write and polls, until the device recovers. */
static void traffic(void)
{
	struct op write = op_on(&p.a, IBV_WR_RDMA_WRITE, 1, 0, 64);
	struct ibv_wc wc;
	int outstanding = 0;

	write.remote = (uintptr_t)p.b.buf;
	write.rkey = p.b.mr->rkey;
	write.flags = IBV_SEND_SIGNALED;
	while (!recovered) {
		if (outstanding < 8 && !post_ops(&p.a, &write, 1, POST, NULL))
			outstanding++;
		outstanding -= ibv_poll_cq(p.a.cq, 1, &wc) > 0;
	}
}

struct extras {
	struct ibv_qp *keys;
	struct mlx5dv_mkey *mkey;
	struct mlx5dv_devx_uar *uar;
	struct mlx5dv_devx_umem *umem;
	struct mlx5dv_devx_cmd_comp *answers;
	struct mlx5dv_devx_event_channel *events;
	struct mlx5dv_devx_obj *counter;
	uint8_t *memory;
};

static struct mlx5dv_devx_obj *make_counter(void)
{
	uint32_t in[4] = {htobe32(0x771 << 16)}, out[4];

	return mlx5dv_devx_obj_create(p.ctx, in, sizeof(in), out, sizeof(out));
}

static struct extras make_extras(void)
{
	struct ibv_qp_init_attr_ex init = {
		.cap = {.max_send_wr = 16, .max_recv_wr = 1, .max_send_sge = 1,
			.max_recv_sge = 1, .max_inline_data = 512},
		.qp_type = IBV_QPT_RC,
		.send_cq = p.a.cq,
		.recv_cq = p.a.cq,
		.pd = p.pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_SEND,
	};
	struct mlx5dv_qp_init_attr own = {
		.comp_mask = MLX5DV_QP_INIT_ATTR_MASK_SEND_OPS_FLAGS,
		.send_ops_flags = MLX5DV_QP_EX_WITH_MR_INTERLEAVED,
	};
	struct mlx5dv_mkey_init_attr key = {
		.pd = p.pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT,
		.max_entries = 4,
	};
	struct extras x = {};

	x.memory = aligned_alloc(4096, 4096);
	CHECK(x.memory);
	/* Not every profile has all of them: one that is missing is missing for both. */
	x.keys = mlx5dv_create_qp(p.ctx, &init, &own);
	object("create_qp before", x.keys);
	x.mkey = mlx5dv_create_mkey(&key);
	object("create_mkey before", x.mkey);
	x.uar = mlx5dv_devx_alloc_uar(p.ctx, MLX5DV_UAR_ALLOC_TYPE_NC);
	object("devx_alloc_uar before", x.uar);
	x.umem = mlx5dv_devx_umem_reg(p.ctx, x.memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	object("devx_umem_reg before", x.umem);
	x.answers = mlx5dv_devx_create_cmd_comp(p.ctx);
	object("devx_create_cmd_comp before", x.answers);
	x.events = mlx5dv_devx_create_event_channel(p.ctx, 0);
	object("devx_create_event_channel before", x.events);
	x.counter = make_counter();
	object("devx_obj_create before", x.counter);
	return x;
}

static void verbs(void)
{
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
	struct ibv_qp_init_attr init;
	struct ibv_device_attr device;
	struct ibv_port_attr port;
	struct ibv_cq *cq;
	void *context;

	result("query_device", ibv_query_device(p.ctx, &device));
	result("query_port", ibv_query_port(p.ctx, 1, &port));
	result("query_qp", ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE, &init));
	attr.qp_state = IBV_QPS_ERR;
	result("modify_qp", ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE));
	result("req_notify_cq", ibv_req_notify_cq(p.a.cq, 0));
	CHECK(!fcntl(p.a.ch->fd, F_SETFL, O_NONBLOCK));
	result("get_cq_event", ibv_get_cq_event(p.a.ch, &cq, &context));
	object("alloc_pd", ibv_alloc_pd(p.ctx));
	object("reg_mr", ibv_reg_mr(p.pd, p.a.buf, 64, IBV_ACCESS_LOCAL_WRITE));
	object("create_cq", ibv_create_cq(p.ctx, 16, NULL, NULL, 0));
}

static void direct_verbs(struct extras *x)
{
	uint32_t in[4] = {htobe32(QUERY_HCA_CAP << 16), htobe32(1)}, out[1024];
	struct mlx5dv_qp ring = {};
	struct mlx5dv_cq queue = {};
	struct mlx5dv_obj obj = {
		.qp = {.in = p.a.qp, .out = &ring},
		.cq = {.in = p.a.cq, .out = &queue},
	};
	struct mlx5dv_mkey_init_attr key = {
		.pd = p.pd,
		.create_flags = MLX5DV_MKEY_INIT_ATTR_FLAGS_INDIRECT,
		.max_entries = 4,
	};
	uint32_t number;

	result("init_obj", mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ));
	result("devx_general_cmd",
	       mlx5dv_devx_general_cmd(p.ctx, in, sizeof(in), out, sizeof(out)));
	result("devx_query_eqn", mlx5dv_devx_query_eqn(p.ctx, 0, &number));
	object("devx_obj_create", make_counter());
	object("devx_alloc_uar", mlx5dv_devx_alloc_uar(p.ctx, MLX5DV_UAR_ALLOC_TYPE_NC));
	object("devx_umem_reg",
	       mlx5dv_devx_umem_reg(p.ctx, x->memory, 4096, IBV_ACCESS_LOCAL_WRITE));
	object("create_mkey", mlx5dv_create_mkey(&key));
	if (x->counter) {
		uint32_t query[4] = {htobe32(0x773 << 16)};

		if (x->answers)
			result("devx_obj_query_async",
			       mlx5dv_devx_obj_query_async(x->counter, query, sizeof(query),
							   64, 1, x->answers));
		result("devx_obj_query", mlx5dv_devx_obj_query(x->counter, query,
							       sizeof(query), out, 272));
	}
	if (x->answers) {
		struct mlx5dv_devx_async_cmd_hdr *answer = (void *)out;

		CHECK(!fcntl(x->answers->fd, F_SETFL, O_NONBLOCK));
		result("devx_get_async_cmd_comp",
		       mlx5dv_devx_get_async_cmd_comp(x->answers, answer, sizeof(out)));
	}
	if (x->events) {
		struct mlx5dv_devx_async_event_hdr *event = (void *)out;

		CHECK(!fcntl(x->events->fd, F_SETFL, O_NONBLOCK));
		result("devx_get_event",
		       mlx5dv_devx_get_event(x->events, event, sizeof(out)) < 0 ? -1 : 0);
	}
}

static void destroy(struct extras *x)
{
	if (x->mkey)
		result("destroy_mkey", mlx5dv_destroy_mkey(x->mkey));
	if (x->counter)
		result("devx_obj_destroy", mlx5dv_devx_obj_destroy(x->counter));
	if (x->umem)
		result("devx_umem_dereg", mlx5dv_devx_umem_dereg(x->umem));
	if (x->uar)
		mlx5dv_devx_free_uar(x->uar);
	if (x->answers)
		mlx5dv_devx_destroy_cmd_comp(x->answers);
	if (x->events)
		mlx5dv_devx_destroy_event_channel(x->events);
	if (x->keys)
		result("destroy_qp of keys", ibv_destroy_qp(x->keys));
	result("destroy_qp", ibv_destroy_qp(p.a.qp));
	result("destroy_qp of the peer", ibv_destroy_qp(p.b.qp));
	result("destroy_cq", ibv_destroy_cq(p.a.cq));
	result("dereg_mr", ibv_dereg_mr(p.a.mr));
	result("dealloc_pd", ibv_dealloc_pd(p.pd));
	result("close_device", ibv_close_device(p.ctx));
}

int main(void)
{
	struct pair_opts o = {.type = IBV_QPT_RC, .events = true};
	struct ibv_async_event event;
	struct extras x;
	bool fatal = false;

	setvbuf(stdout, NULL, _IOLBF, 0);
	signal(SIGUSR1, on_signal);
	test_limit(600);
	p.ctx = open_with_devx();
	pair_open_on(&p, p.ctx, o);
	x = make_extras();
	puts("ready");
	traffic();
	CHECK(!fcntl(p.ctx->async_fd, F_SETFL, O_NONBLOCK));
	while (!ibv_get_async_event(p.ctx, &event)) {
		fatal |= event.event_type == IBV_EVENT_DEVICE_FATAL;
		ibv_ack_async_event(&event);
	}
	printf("event of the failure: %d\n", fatal);
	verbs();
	direct_verbs(&x);
	destroy(&x);
	puts("end");
	return 0;
}
