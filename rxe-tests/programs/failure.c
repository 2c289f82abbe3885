/* SPDX-License-Identifier: MIT */
/*
 * The device fails while a program uses a connection and objects of mlx5dv. The program
 * prints "ready", posts until SIGUSR1, which is sent after the device has recovered, and
 * then prints the result of each call: rdma-core's libmlx5 and a replacement must print
 * the same.
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

/* Prints the errno that a verb returned or set. */
static void print_result(const char *call, int rc)
{
	printf("%s: %d\n", call, rc < 0 ? errno : rc);
}

static void print_object(const char *call, const void *created)
{
	printf("%s: %d\n", call, created ? 0 : errno);
}

/* Opens the device with DevX, if its driver supports that. */
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

/* Posts writes and polls until the device has recovered. */
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
	struct ibv_qp *mkey_qp;
	struct mlx5dv_mkey *mkey;
	struct mlx5dv_devx_uar *uar;
	struct mlx5dv_devx_umem *umem;
	struct mlx5dv_devx_cmd_comp *cmd_comp;
	struct mlx5dv_devx_event_channel *events;
	struct mlx5dv_devx_obj *counter;
	uint8_t *memory;
};

static struct mlx5dv_devx_obj *create_counter(void)
{
	uint32_t in[4] = {htobe32(0x771 << 16)}, out[4];

	return mlx5dv_devx_obj_create(p.ctx, in, sizeof(in), out, sizeof(out));
}

static struct extras create_extras(void)
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
	struct mlx5dv_qp_init_attr dv_init = {
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
	/* Not every device has all of them: both libraries then fail alike. */
	x.mkey_qp = mlx5dv_create_qp(p.ctx, &init, &dv_init);
	print_object("create_qp before", x.mkey_qp);
	x.mkey = mlx5dv_create_mkey(&key);
	print_object("create_mkey before", x.mkey);
	x.uar = mlx5dv_devx_alloc_uar(p.ctx, MLX5DV_UAR_ALLOC_TYPE_NC);
	print_object("devx_alloc_uar before", x.uar);
	x.umem = mlx5dv_devx_umem_reg(p.ctx, x.memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	print_object("devx_umem_reg before", x.umem);
	x.cmd_comp = mlx5dv_devx_create_cmd_comp(p.ctx);
	print_object("devx_create_cmd_comp before", x.cmd_comp);
	x.events = mlx5dv_devx_create_event_channel(p.ctx, 0);
	print_object("devx_create_event_channel before", x.events);
	x.counter = create_counter();
	print_object("devx_obj_create before", x.counter);
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

	print_result("query_device", ibv_query_device(p.ctx, &device));
	print_result("query_port", ibv_query_port(p.ctx, 1, &port));
	print_result("query_qp", ibv_query_qp(p.a.qp, &attr, IBV_QP_STATE, &init));
	attr.qp_state = IBV_QPS_ERR;
	print_result("modify_qp", ibv_modify_qp(p.a.qp, &attr, IBV_QP_STATE));
	print_result("req_notify_cq", ibv_req_notify_cq(p.a.cq, 0));
	CHECK(!fcntl(p.a.ch->fd, F_SETFL, O_NONBLOCK));
	print_result("get_cq_event", ibv_get_cq_event(p.a.ch, &cq, &context));
	print_object("alloc_pd", ibv_alloc_pd(p.ctx));
	print_object("reg_mr", ibv_reg_mr(p.pd, p.a.buf, 64, IBV_ACCESS_LOCAL_WRITE));
	print_object("create_cq", ibv_create_cq(p.ctx, 16, NULL, NULL, 0));
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

	print_result("init_obj", mlx5dv_init_obj(&obj, MLX5DV_OBJ_QP | MLX5DV_OBJ_CQ));
	print_result("devx_general_cmd",
	       mlx5dv_devx_general_cmd(p.ctx, in, sizeof(in), out, sizeof(out)));
	print_result("devx_query_eqn", mlx5dv_devx_query_eqn(p.ctx, 0, &number));
	print_object("devx_obj_create", create_counter());
	print_object("devx_alloc_uar", mlx5dv_devx_alloc_uar(p.ctx, MLX5DV_UAR_ALLOC_TYPE_NC));
	print_object("devx_umem_reg",
	       mlx5dv_devx_umem_reg(p.ctx, x->memory, 4096, IBV_ACCESS_LOCAL_WRITE));
	print_object("create_mkey", mlx5dv_create_mkey(&key));
	if (x->counter) {
		uint32_t query[4] = {htobe32(0x773 << 16)};

		if (x->cmd_comp)
			print_result("devx_obj_query_async",
			       mlx5dv_devx_obj_query_async(x->counter, query, sizeof(query),
							   64, 1, x->cmd_comp));
		print_result("devx_obj_query", mlx5dv_devx_obj_query(x->counter, query,
							       sizeof(query), out, 272));
	}
	if (x->cmd_comp) {
		struct mlx5dv_devx_async_cmd_hdr *response = (void *)out;

		CHECK(!fcntl(x->cmd_comp->fd, F_SETFL, O_NONBLOCK));
		print_result("devx_get_async_cmd_comp",
		       mlx5dv_devx_get_async_cmd_comp(x->cmd_comp, response, sizeof(out)));
	}
	if (x->events) {
		struct mlx5dv_devx_async_event_hdr *event = (void *)out;

		CHECK(!fcntl(x->events->fd, F_SETFL, O_NONBLOCK));
		print_result("devx_get_event",
		       mlx5dv_devx_get_event(x->events, event, sizeof(out)) < 0 ? -1 : 0);
	}
}

static void destroy(struct extras *x)
{
	if (x->mkey)
		print_result("destroy_mkey", mlx5dv_destroy_mkey(x->mkey));
	if (x->counter)
		print_result("devx_obj_destroy", mlx5dv_devx_obj_destroy(x->counter));
	if (x->umem)
		print_result("devx_umem_dereg", mlx5dv_devx_umem_dereg(x->umem));
	if (x->uar)
		mlx5dv_devx_free_uar(x->uar);
	if (x->cmd_comp)
		mlx5dv_devx_destroy_cmd_comp(x->cmd_comp);
	if (x->events)
		mlx5dv_devx_destroy_event_channel(x->events);
	if (x->mkey_qp)
		print_result("destroy_qp of mkey_qp", ibv_destroy_qp(x->mkey_qp));
	print_result("destroy_qp", ibv_destroy_qp(p.a.qp));
	print_result("destroy_qp of the peer", ibv_destroy_qp(p.b.qp));
	print_result("destroy_cq", ibv_destroy_cq(p.a.cq));
	print_result("dereg_mr", ibv_dereg_mr(p.a.mr));
	print_result("dealloc_pd", ibv_dealloc_pd(p.pd));
	print_result("close_device", ibv_close_device(p.ctx));
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
	x = create_extras();
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
