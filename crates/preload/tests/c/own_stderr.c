/*
 * Lets a work request fail, whose report goes to standard error, which the program uses in the way
 * that the first argument names.
 */
#define _GNU_SOURCE
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "check.h"
#include "loopback.h"

static char memory[4096];

static void fail(void)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_qp_attr rights = { .qp_access_flags = all, .timeout = 14, .retry_cnt = 7,
				      .rnr_retry = 7, .min_rnr_timer = 1 };
	struct ibv_qp_init_attr ask = { .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1, 0 } };
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_context *context;
	struct ibv_sge list;
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_pd *pd;
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	struct ibv_wc wc;

	CHECK(devices && devices[0]);
	CHECK((context = ibv_open_device(devices[0])) && (pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, memory, sizeof(memory), all)));
	CHECK((ask.send_cq = ask.recv_cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	CHECK((qp = ibv_create_qp(pd, &ask)));
	connect_to(qp, qp->qp_num, rights);
	list = (struct ibv_sge){ (uintptr_t)memory, 64, mr->lkey };
	wr.wr.rdma.remote_addr = (uintptr_t)memory;
	wr.wr.rdma.rkey = mr->rkey + 0x100000;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	while (!ibv_poll_cq(ask.send_cq, 1, &wc))
		;
	/* Flushed, if the queue pair is in error before it gets its own NAK. */
	CHECK(wc.status != IBV_WC_SUCCESS);
}

/* Runs at the end, after the library's own: its handler is older. */
static void has_own_bytes_only(void)
{
	if (lseek(2, 0, SEEK_END) != 4)
		_exit(1);
}

static void *thread(void *nothing)
{
	(void)nothing;
	fail();
	exit(0);
}

int main(int count, char **arguments)
{
	int is_closed = count == 2 && !strcmp(arguments[1], "closed");
	int pair[2], kept;
	pthread_t other;

	CHECK(count == 2);
	if (is_closed || !strcmp(arguments[1], "duplicated")) {
		CHECK((kept = dup(2)) > 2 && !close(2));
		CHECK(memfd_create("data", 0) == 2 && write(2, "data", 4) == 4);
		if (is_closed)
			CHECK(!atexit(has_own_bytes_only));
		else
			CHECK(dup2(kept, 2) == 2);
	} else if (!strcmp(arguments[1], "pipe")) {
		/* Nobody reads it. */
		CHECK(!pipe(pair) && dup2(pair[1], 2) == 2);
		CHECK(!close(pair[0]) && !close(pair[1]));
	} else if (!strcmp(arguments[1], "thread")) {
		CHECK(!pthread_create(&other, NULL, thread, NULL));
		pthread_exit(NULL);
	}
	fail();
	return 0;
}
