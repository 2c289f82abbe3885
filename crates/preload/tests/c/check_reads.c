/*
 * Receives a message, and reads the buffer in the way that the first argument names before the
 * completion is polled, or with a second argument afterwards.
 */
#include <infiniband/verbs.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "check.h"
#include "loopback.h"

#define LENGTH 16384

static char *memory;
static struct ibv_pd *pd;
static struct ibv_cq *cq, *sends;
static struct ibv_srq *srq;
static struct ibv_mr *mr;

static struct ibv_qp *queue_pair(int shared)
{
	struct ibv_qp_init_attr attr = {
		.send_cq = sends, .recv_cq = cq, .srq = shared ? srq : NULL, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 8, .max_recv_wr = shared ? 0 : 8, .max_send_sge = 1,
			 .max_recv_sge = shared ? 0 : 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &attr);

	CHECK(qp);
	return qp;
}

static void receive(struct ibv_qp *qp, char *at, int length)
{
	struct ibv_sge list = { (uintptr_t)at, length, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 0x7e, .sg_list = &list, .num_sge = 1 }, *bad;

	CHECK(!(qp->srq ? ibv_post_srq_recv(srq, &wr, &bad) : ibv_post_recv(qp, &wr, &bad)));
}

static void poll_one(struct ibv_cq *queue)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(queue, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static void send_to(struct ibv_qp *qp, int length)
{
	struct ibv_sge list = { (uintptr_t)memory + LENGTH, length, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static __attribute__((noinline)) void *read_from(void *at)
{
	CHECK(*(volatile char *)at != 1);
	return NULL;
}

static void look(const char *how)
{
	pthread_t thread;
	char copy[64];
	int fd;

	if (!strcmp(how, "read") || !strcmp(how, "shared")) {
		read_from(memory + 5000);
	} else if (!strcmp(how, "copy")) {
		memcpy(copy, memory + 4000, sizeof(copy));
		CHECK(copy[5] != 1);
	} else if (!strcmp(how, "thread")) {
		CHECK(!pthread_create(&thread, NULL, read_from, memory));
		CHECK(!pthread_join(thread, NULL));
	/* What follows is right in either case, or not found. */
	} else if (!strcmp(how, "write")) {
		memset(memory, 3, LENGTH);
	} else if (!strcmp(how, "call")) {
		fd = open("/dev/null", O_WRONLY);
		CHECK(fd >= 0 && write(fd, memory, LENGTH) == LENGTH && !close(fd));
	} else if (!strcmp(how, "beside")) {
		read_from(memory + 2 * LENGTH);
	} else if (!strcmp(how, "part")) {
		/* The page has other data, too. */
		read_from(memory + 100);
	} else {
		CHECK(!strcmp(how, "twice") || !strcmp(how, "arrived"));
	}
}

int main(int argc, char **argv)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	struct ibv_qp_attr rights = { .qp_access_flags = 7, .timeout = 14, .retry_cnt = 7,
				      .rnr_retry = 6, .min_rnr_timer = 1 };
	struct ibv_srq_init_attr shared = { .attr = { .max_wr = 8, .max_sge = 1 } };
	struct ibv_context *context;
	struct ibv_qp *qp, *peer;
	int right = argc > 2, is_part, offset, length;

	CHECK(argc > 1 && devices && devices[0]);
	is_part = !strcmp(argv[1], "part");
	offset = is_part ? 64 : 0;
	length = is_part ? 1024 : LENGTH;
	context = ibv_open_device(devices[0]);
	CHECK(context && (pd = ibv_alloc_pd(context)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	CHECK((sends = ibv_create_cq(context, 16, NULL, NULL, 0)));
	CHECK((srq = ibv_create_srq(pd, &shared)));
	memory = mmap(NULL, 4 * LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	CHECK((mr = ibv_reg_mr(pd, memory, 4 * LENGTH, IBV_ACCESS_LOCAL_WRITE)));
	qp = queue_pair(!strcmp(argv[1], "shared"));
	peer = queue_pair(0);
	connect_to(qp, peer->qp_num, rights);
	connect_to(peer, qp->qp_num, rights);
	receive(qp, memory + offset, length);
	if (!strcmp(argv[1], "twice")) {
		receive(qp, memory + offset, length);
		send_to(peer, length);
		poll_one(sends);
		poll_one(cq);
		read_from(memory);
	}
	if (!strcmp(argv[1], "arrived")) {
		send_to(peer, length);
		poll_one(sends);
		read_from(memory);
	} else {
		if (!right)
			look(argv[1]);
		send_to(peer, length);
		poll_one(sends);
	}
	poll_one(cq);
	if (right)
		look(argv[1]);
	CHECK(!memory[offset]);
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_qp(peer) && !ibv_destroy_srq(srq));
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_cq(sends));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	return 0;
}
