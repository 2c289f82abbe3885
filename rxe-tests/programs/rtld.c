/* SPDX-License-Identifier: MIT */
/*
 * Uses libibverbs as NCCL does: not linked to it, opened with RTLD_LOCAL, symbols
 * from dlvsym. A provider must find the library that loaded it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static void *lib;

static void fail(const char *what)
{
	fprintf(stderr, "FAILED rtld.c: %s\n", what);
	exit(1);
}

static void *sym(const char *name)
{
	void *at = dlvsym(lib, name, "IBVERBS_1.1");

	if (!at)
		at = dlsym(lib, name);
	if (!at)
		fail(name);
	return at;
}

#define FN(ret, name, ...) ret (*name)(__VA_ARGS__) = sym(#name)
#define CHECK(cond)                                                             \
	do {                                                                   \
		if (!(cond))                                                   \
			fail(#cond);                                           \
	} while (0)

int main(void)
{
	int mode, round;

	alarm(60);
	CHECK(!dlsym(RTLD_DEFAULT, "ibv_get_device_list"));
	/* Lazy and immediate binding; closed and opened again. */
	for (round = 0; round < 4; round++) {
		const char *want = getenv("RXE_DEV"),
			   *expect = getenv("RXE_EXPECT");
		struct ibv_device **list;
		struct ibv_context *ctx = NULL;
		struct ibv_wc wc;
		struct ibv_pd *pd;
		struct ibv_cq *cq;
		struct ibv_mr *mr;
		struct ibv_qp *qp;
		struct ibv_recv_wr wr = {.wr_id = 77}, *bad;
		struct ibv_sge sge;
		static char buf[4096];
		Dl_info info;
		int n, i;

		mode = round % 2 ? RTLD_NOW : RTLD_LAZY;
		lib = dlopen("libibverbs.so.1", mode | RTLD_LOCAL);
		if (!lib)
			fail(dlerror());
		FN(struct ibv_device **, ibv_get_device_list, int *);
		FN(void, ibv_free_device_list, struct ibv_device **);
		FN(const char *, ibv_get_device_name, struct ibv_device *);
		FN(struct ibv_context *, ibv_open_device, struct ibv_device *);
		FN(int, ibv_close_device, struct ibv_context *);
		FN(struct ibv_pd *, ibv_alloc_pd, struct ibv_context *);
		FN(int, ibv_dealloc_pd, struct ibv_pd *);
		struct ibv_mr *(*reg_mr)(struct ibv_pd *, void *, size_t, int) =
			sym("ibv_reg_mr");
		FN(int, ibv_dereg_mr, struct ibv_mr *);
		FN(struct ibv_cq *, ibv_create_cq, struct ibv_context *, int,
		   void *, struct ibv_comp_channel *, int);
		FN(int, ibv_destroy_cq, struct ibv_cq *);
		FN(struct ibv_qp *, ibv_create_qp, struct ibv_pd *,
		   struct ibv_qp_init_attr *);
		FN(int, ibv_modify_qp, struct ibv_qp *, struct ibv_qp_attr *,
		   int);
		FN(int, ibv_destroy_qp, struct ibv_qp *);

		list = ibv_get_device_list(&n);
		CHECK(list && n > 0);
		for (i = 0; i < n && !ctx; i++)
			if (!want || !strcmp(ibv_get_device_name(list[i]), want))
				ctx = ibv_open_device(list[i]);
		ibv_free_device_list(list);
		CHECK(ctx);
		CHECK(dladdr((void *)ctx->ops.poll_cq, &info));
		fprintf(stderr, "provider %s\n", info.dli_fname);
		if (expect && !strstr(info.dli_fname, expect))
			fail("served by another provider than RXE_EXPECT");
		pd = ibv_alloc_pd(ctx);
		CHECK(pd);
		mr = reg_mr(pd, buf, sizeof(buf), IBV_ACCESS_LOCAL_WRITE);
		CHECK(mr);
		cq = ibv_create_cq(ctx, 16, NULL, NULL, 0);
		CHECK(cq);
		struct ibv_qp_init_attr attr = {.send_cq = cq,
						.recv_cq = cq,
						.cap = {4, 4, 1, 1, 0},
						.qp_type = IBV_QPT_RC};
		qp = ibv_create_qp(pd, &attr);
		CHECK(qp);
		struct ibv_qp_attr qa = {.qp_state = IBV_QPS_INIT,
					 .port_num = 1};
		CHECK(!ibv_modify_qp(qp, &qa,
				     IBV_QP_STATE | IBV_QP_PKEY_INDEX |
					    IBV_QP_PORT | IBV_QP_ACCESS_FLAGS));
		sge = (struct ibv_sge){(uintptr_t)buf, 64, mr->lkey};
		wr.sg_list = &sge;
		wr.num_sge = 1;
		CHECK(!ibv_post_recv(qp, &wr, &bad)); /* through ctx->ops */
		qa.qp_state = IBV_QPS_ERR;
		CHECK(!ibv_modify_qp(qp, &qa, IBV_QP_STATE));
		for (i = 0; i < 5000 && !(n = ibv_poll_cq(cq, 1, &wc)); i++)
			usleep(1000);
		CHECK(n == 1 && wc.wr_id == 77 &&
		      wc.status == IBV_WC_WR_FLUSH_ERR &&
		      wc.qp_num == qp->qp_num);
		CHECK(!ibv_destroy_qp(qp));
		CHECK(!ibv_destroy_cq(cq));
		CHECK(!ibv_dereg_mr(mr));
		CHECK(!ibv_dealloc_pd(pd));
		CHECK(!ibv_close_device(ctx));
		CHECK(!dlclose(lib));
	}
	printf("passed rtld\n");
	return 0;
}
