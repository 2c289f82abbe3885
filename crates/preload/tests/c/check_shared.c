/*
 * As check_cases.c: errors in the use of shared receive queues, and of the buffers of receives.
 * Queue pairs a[0] and a[1] send, b[0] and b[1] receive.
 */
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "check.h"
#include "loopback.h"

#define LENGTH 16384

static char memory[LENGTH] __attribute__((aligned(4096)));
static char *target;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq, *receives;
static struct ibv_mr *mr, *target_mr;
static struct ibv_srq *srq;
static struct ibv_qp *a[2], *b[2];
static int right;

static struct ibv_qp_attr rights = {
	.qp_access_flags = IBV_ACCESS_REMOTE_WRITE,
	.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 1,
};

static struct ibv_srq *shared_queue(struct ibv_pd *of)
{
	struct ibv_srq_init_attr ask = { .attr = { .max_wr = 16, .max_sge = 2 } };
	struct ibv_srq *queue = ibv_create_srq(of, &ask);

	CHECK(queue);
	return queue;
}

static struct ibv_qp *queue_pair(struct ibv_srq *of)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = cq, .recv_cq = receives, .srq = of, .qp_type = IBV_QPT_RC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1,
			 .max_recv_sge = 2 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &ask);

	CHECK(qp);
	return qp;
}

static uint64_t poll_one(struct ibv_cq *from)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(from, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
	return wc.wr_id;
}

static void send_from(struct ibv_qp *qp, enum ibv_wr_opcode opcode, int length)
{
	struct ibv_sge list = { (uintptr_t)memory, length, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = length != 0, .opcode = opcode,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	wr.wr.rdma.remote_addr = (uintptr_t)target;
	wr.wr.rdma.rkey = target_mr->rkey;
	CHECK(!ibv_post_send(qp, &wr, &bad));
	poll_one(cq);
}

static void receive(struct ibv_srq *queue, uint64_t wr_id, struct ibv_mr *of, char *into, int length)
{
	struct ibv_sge list = { (uintptr_t)into, length, of->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &list, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_srq_recv(queue, &wr, &bad));
}

/* Gets two messages of which the second one changes a byte of the first. */
static void overwrite(const char *how)
{
	int length = strcmp(how, "long") ? 256 : 8192, other = !strcmp(how, "two");
	struct ibv_sge list[2] = { { (uintptr_t)target, 100, target_mr->lkey },
				   { (uintptr_t)target + 100, 156, target_mr->lkey } };
	struct ibv_recv_wr second = { .wr_id = 2, .sg_list = list, .num_sge = 2 };
	struct ibv_recv_wr first = { .wr_id = 1, .next = &second, .sg_list = list, .num_sge = 2 };
	struct ibv_recv_wr *bad;

	if (!strcmp(how, "list")) {
		CHECK(!ibv_post_srq_recv(srq, &first, &bad));
	} else {
		receive(srq, 1, target_mr, target, length);
		receive(srq, strcmp(how, "id") ? 2 : 1, target_mr, target, length);
	}
	memset(memory, 1, length);
	send_from(a[0], IBV_WR_SEND, length);
	if (right)
		poll_one(receives);
	memory[length - 1]++;
	send_from(a[other], IBV_WR_SEND, length);
	if (!right)
		poll_one(receives);
	poll_one(receives);
}

/* Gets messages with and without data, all in the same few buffers. */
static void repeat(const char *how)
{
	int same = !strcmp(how, "same-id");

	for (int n = 0; n < 4; n++)
		receive(srq, same ? 0 : n, target_mr, target + n % 2 * 256, 256);
	for (int n = 0; n < 64; n++) {
		struct ibv_qp *from = a[n / 3 % 2];
		uint64_t wr_id;

		memory[0] = n;
		if (n % 5 == 3)
			send_from(from, IBV_WR_RDMA_WRITE_WITH_IMM, n % 2 ? 8 : 0);
		else
			send_from(from, IBV_WR_SEND, n % 7 == 3 ? 0 : 100 + n);
		wr_id = poll_one(receives);
		receive(srq, wr_id, target_mr, target + (same ? n : wr_id) % 2 * 256, 256);
	}
}

/* Posts more than there is room for, and uses what was accepted. */
static void refuse(void)
{
	struct ibv_recv_wr wr[40] = { 0 }, *bad;
	struct ibv_sge list[40];

	for (int n = 0; n < 40; n++) {
		list[n] = (struct ibv_sge){ (uintptr_t)target + n * 64, 64, target_mr->lkey };
		wr[n] = (struct ibv_recv_wr){ .wr_id = n, .sg_list = &list[n], .num_sge = 1,
					      .next = n < 39 ? &wr[n + 1] : NULL };
	}
	for (int n = 0; n < 3; n++)
		CHECK(ibv_post_srq_recv(srq, wr, &bad) == ENOMEM);
	for (int n = 0; n < 16; n++) {
		memory[0] = n;
		send_from(a[0], IBV_WR_SEND, 64);
		poll_one(receives);
		receive(srq, n, target_mr, target + n * 64, 64);
	}
}

/* Posts a receive whose region, or memory, is gone before its completion is polled. */
static void leave(const char *what, struct ibv_qp *to)
{
	char *other = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *region = ibv_reg_mr(pd, other, 4096, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_sge list = { (uintptr_t)other, 64, region->lkey };
	struct ibv_recv_wr wr = { .wr_id = 7, .sg_list = &list, .num_sge = 1 }, *bad;
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };

	CHECK(other != MAP_FAILED && region);
	if (to)
		CHECK(!ibv_post_recv(to, &wr, &bad));
	else
		CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
	send_from(a[0], IBV_WR_SEND, 64);
	if (right)
		poll_one(receives);
	/* The device accesses no buffers of a queue pair that is in error. */
	if (!strcmp(what, "ended"))
		CHECK(!ibv_modify_qp(b[0], &error, IBV_QP_STATE));
	if (strcmp(what, "unmapped"))
		CHECK(!ibv_dereg_mr(region));
	CHECK(!strcmp(what, "deregistered") || !munmap(other, 4096));
	if (!right)
		poll_one(receives);
	CHECK(strcmp(what, "unmapped") || !ibv_dereg_mr(region));
}

/* Uses a queue after it was destroyed. */
static void again(void)
{
	struct ibv_srq *queue = shared_queue(pd);
	struct ibv_recv_wr wr = { .num_sge = 0 }, *bad;

	if (right)
		CHECK(!ibv_post_srq_recv(queue, &wr, &bad));
	CHECK(!ibv_destroy_srq(queue));
	if (!right)
		CHECK(ibv_post_srq_recv(queue, &wr, &bad) && bad == &wr);
}

/* Posts to the queue pair, which has no receives of its own. */
static void bypass(void)
{
	struct ibv_sge list = { (uintptr_t)target, 64, target_mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &list, .num_sge = 1 }, *bad;

	if (right)
		CHECK(!ibv_post_srq_recv(srq, &wr, &bad));
	else
		CHECK(ibv_post_recv(b[0], &wr, &bad));
}

/* Receives into a region of the queue pair's domain, which is not the queue's, or the reverse. */
static void domain(int of_queue)
{
	struct ibv_pd *another = ibv_alloc_pd(context);
	struct ibv_srq *queue = shared_queue(another);
	struct ibv_mr *region = ibv_reg_mr(of_queue ? another : pd, target, 4096,
					   IBV_ACCESS_LOCAL_WRITE);
	struct ibv_qp *from = queue_pair(NULL), *to = queue_pair(queue);
	struct ibv_sge list = { (uintptr_t)memory, 64, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	CHECK(another && region);
	connect_to(from, to->qp_num, rights);
	connect_to(to, from->qp_num, rights);
	receive(queue, 9, region, target, 64);
	CHECK(!ibv_post_send(from, &wr, &bad));
	while (!ibv_poll_cq(cq, 1, &wc))
		;
	CHECK((wc.status == IBV_WC_SUCCESS) == of_queue);
	while (!ibv_poll_cq(receives, 1, &wc))
		;
	CHECK((wc.status == IBV_WC_SUCCESS) == of_queue);
	CHECK(!ibv_destroy_qp(from) && !ibv_destroy_qp(to) && !ibv_destroy_srq(queue));
	CHECK(!ibv_dereg_mr(region) && !ibv_dealloc_pd(another));
}

int main(int count, char **arguments)
{
	struct ibv_device **devices = ibv_get_device_list(NULL);
	const char *mistake = arguments[1];
	int is_own = !strncmp(mistake, "own-", 4);

	CHECK(count >= 2 && devices && devices[0]);
	right = count > 2;
	context = ibv_open_device(devices[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	target = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(pd && target != MAP_FAILED);
	mr = ibv_reg_mr(pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	target_mr = ibv_reg_mr(pd, target, LENGTH, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	cq = ibv_create_cq(context, 64, NULL, NULL, 0);
	receives = ibv_create_cq(context, 64, NULL, NULL, 0);
	CHECK(mr && target_mr && cq && receives);
	srq = shared_queue(pd);
	for (int n = 0; n < 2; n++) {
		a[n] = queue_pair(NULL);
		b[n] = queue_pair(is_own ? NULL : srq);
		connect_to(a[n], b[n]->qp_num, rights);
		connect_to(b[n], a[n]->qp_num, rights);
	}
	if (!strncmp(mistake, "overwritten-", 12))
		overwrite(mistake + 12);
	else if (!strcmp(mistake, "again"))
		again();
	else if (!strcmp(mistake, "bypassed"))
		bypass();
	else if (!strcmp(mistake, "domain"))
		domain(right);
	else if (!strcmp(mistake, "refused"))
		refuse();
	else if (!strncmp(mistake, "repeated-", 9))
		repeat(mistake + 9);
	else
		leave(mistake + (is_own ? 4 : 0), is_own ? b[0] : NULL);
	for (int n = 0; n < 2; n++)
		CHECK(!ibv_destroy_qp(a[n]) && !ibv_destroy_qp(b[n]));
	CHECK(!ibv_destroy_srq(srq) && !ibv_dereg_mr(mr) && !ibv_dereg_mr(target_mr));
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_cq(receives) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	return 0;
}
