/*
 * As check_cases.c: errors in the use of shared receive queues, and of the buffers of receives.
 * Queue pairs a[0] and a[1] send, b[0] and b[1] receive. Cases of small completion queues connect
 * those that send to others.
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

static struct ibv_qp *queue_pair_with(struct ibv_srq *of, enum ibv_qp_type type,
				      struct ibv_cq *sends, struct ibv_cq *into)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = sends, .recv_cq = into, .srq = of, .qp_type = type,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 1,
			 .max_recv_sge = 2 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &ask);

	CHECK(qp);
	return qp;
}

static struct ibv_qp *queue_pair(struct ibv_srq *of)
{
	return queue_pair_with(of, IBV_QPT_RC, cq, receives);
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

/* Frees the buffer of a receive before its message arrives. */
static void free_early(void)
{
	char *buffer = malloc(1024);
	struct ibv_mr *region = ibv_reg_mr(pd, buffer, 1024, IBV_ACCESS_LOCAL_WRITE);

	CHECK(buffer && region);
	receive(srq, 7, region, buffer + 512, 64);
	if (!right)
		free(buffer);
	send_from(a[0], IBV_WR_SEND, 64);
	poll_one(receives);
	if (right)
		free(buffer);
	CHECK(!ibv_dereg_mr(region));
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

static struct ibv_cq *small_queue(int entries)
{
	struct ibv_cq *small = ibv_create_cq(context, entries, NULL, NULL, 0);

	CHECK(small && small->cqe == entries);
	return small;
}

/* Connects a queue pair that sends to one whose receives are completed into a queue. */
static struct ibv_qp *receiver(struct ibv_qp *from, struct ibv_srq *of, struct ibv_cq *sends,
			       struct ibv_cq *into)
{
	struct ibv_qp *qp = queue_pair_with(of, IBV_QPT_RC, sends, into);
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };

	CHECK(!ibv_modify_qp(from, &reset, IBV_QP_STATE));
	connect_to(from, qp->qp_num, rights);
	connect_to(qp, from->qp_num, rights);
	return qp;
}

static void receive_many(struct ibv_srq *queue, int count)
{
	for (int n = 0; n < count; n++)
		receive(queue, n, target_mr, target + n * 64, 64);
}

static void write_from(struct ibv_qp *qp)
{
	struct ibv_sge list = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr write = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				     .send_flags = IBV_SEND_SIGNALED }, *bad;

	write.wr.rdma.remote_addr = (uintptr_t)target + LENGTH - 8;
	write.wr.rdma.rkey = target_mr->rkey;
	CHECK(!ibv_post_send(qp, &write, &bad));
}

/* Receives that complete into one queue of 3 entries, and are posted before, and after, there are
 * any queue pairs. */
static void fill(const char *how)
{
	struct ibv_cq *small = small_queue(3);
	struct ibv_srq *queue = shared_queue(pd);
	int is_late = !strcmp(how, "late"), sends = !strcmp(how, "sends");
	int count = right || sends ? 3 : 4;
	struct ibv_qp *first, *second;

	if (is_late)
		receive_many(queue, count - 1);
	first = receiver(a[0], queue, sends ? small : cq, small);
	second = receiver(a[1], queue, cq, small);
	if (sends && right) {
		write_from(first);
		poll_one(small);
	}
	if (is_late)
		receive(queue, 7, target_mr, target + 512, 64);
	else
		receive_many(queue, count);
	if (sends && !right) {
		write_from(first);
		poll_one(small);
	}
	for (int n = 0; n < count; n++) {
		send_from(a[n % 2], IBV_WR_SEND, 64);
		poll_one(small);
	}
	/* The completion queue may be gone first. */
	CHECK(!ibv_destroy_qp(first) && !ibv_destroy_qp(second) && !ibv_destroy_cq(small));
	if (strcmp(how, "left"))
		CHECK(!ibv_destroy_srq(queue));
	else
		exit(0);
}

/* As above, of datagrams. */
static void fill_datagrams(void)
{
	struct ibv_cq *small = small_queue(3);
	struct ibv_srq *queue = shared_queue(pd);
	struct ibv_qp *to = queue_pair_with(queue, IBV_QPT_UD, cq, small);
	struct ibv_qp_attr attr = { .qkey = 7 };
	struct ibv_ah_attr address = { .is_global = 1, .port_num = 1 };
	struct ibv_sge list = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	connect_to(to, 0, attr);
	CHECK(!ibv_query_gid(context, 1, 0, &address.grh.dgid));
	wr.wr.ud.ah = ibv_create_ah(pd, &address);
	CHECK(wr.wr.ud.ah);
	wr.wr.ud.remote_qpn = to->qp_num;
	wr.wr.ud.remote_qkey = 7;
	receive_many(queue, 3);
	for (int n = 0; n < 8; n++) {
		CHECK(!ibv_post_send(to, &wr, &bad));
		poll_one(cq);
		poll_one(small);
		receive(queue, 8, target_mr, target + 1024, 64);
	}
	if (!right)
		receive(queue, 9, target_mr, target + 1024, 64);
	CHECK(!ibv_destroy_ah(wr.wr.ud.ah) && !ibv_destroy_qp(to) && !ibv_destroy_cq(small));
	CHECK(!ibv_destroy_srq(queue));
}

/* Messages for one of two completion queues: together with a send, or of themselves, they are more
 * than it has entries. The other one may get all of the other receives. */
static void arrive(const char *how)
{
	struct ibv_cq *small = small_queue(3), *other = small_queue(3);
	struct ibv_srq *queue = shared_queue(pd);
	struct ibv_qp *first = receiver(a[0], queue, small, small);
	struct ibv_qp *second = receiver(a[1], queue, other, other);
	int is_overrun = !strcmp(how, "messages"), count = is_overrun && !right ? 4 : 3;

	receive_many(queue, 16);
	if (!strcmp(how, "resized") && right)
		CHECK(!ibv_resize_cq(small, 15) && small->cqe == 15);
	for (int n = 0; n < count; n++) {
		send_from(a[0], IBV_WR_SEND, 64);
		if (right && strcmp(how, "resized"))
			poll_one(small);
	}
	for (int n = 0; n < 9; n++) {
		send_from(a[1], IBV_WR_SEND, 64);
		poll_one(other);
	}
	if (is_overrun)
		goto end;
	write_from(first);
	if (!right)
		goto end;
	for (int n = strcmp(how, "resized") ? 3 : 0; n < 4; n++)
		poll_one(small);
end:
	if (!right) {
		poll_one(small);
		poll_one(small);
	}
	CHECK(!ibv_destroy_qp(first) && !ibv_destroy_qp(second) && !ibv_destroy_srq(queue));
	CHECK(!ibv_destroy_cq(small) && !ibv_destroy_cq(other));
}

/* Queue pairs that come one after another, each with a completion queue for its part of the
 * receives. */
static void come(void)
{
	struct ibv_srq *queue = shared_queue(pd);
	struct ibv_cq *small[2];
	struct ibv_qp *to[2];

	for (int n = 0; n < 2; n++) {
		small[n] = small_queue(3);
		to[n] = receiver(a[n], queue, small[n], small[n]);
		receive_many(queue, 7);
		for (int sent = 0; sent < 6; sent++) {
			send_from(a[n], IBV_WR_SEND, 64);
			poll_one(small[n]);
			write_from(to[n]);
			poll_one(small[n]);
		}
	}
	for (int n = 0; n < 2; n++)
		CHECK(!ibv_destroy_qp(to[n]) && !ibv_destroy_cq(small[n]));
	CHECK(!ibv_destroy_srq(queue));
}

/* Queue pairs that end, with messages that have no data and were not polled. */
static void end(int resets)
{
	struct ibv_cq *small = small_queue(3);
	struct ibv_srq *queue = shared_queue(pd);
	struct ibv_qp *to = receiver(a[0], queue, small, small), *other;

	receive_many(queue, 1);
	send_from(a[0], IBV_WR_SEND, 8);
	poll_one(small);
	for (int n = 0; n < 8; n++) {
		receive_many(queue, 3);
		for (int sent = 0; sent < 2; sent++)
			send_from(a[0], IBV_WR_SEND, 0);
		send_from(a[0], IBV_WR_SEND, 8);
		other = to;
		if (resets) {
			struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };

			CHECK(!ibv_modify_qp(to, &reset, IBV_QP_STATE));
			CHECK(!ibv_modify_qp(a[0], &reset, IBV_QP_STATE));
			connect_to(a[0], to->qp_num, rights);
			connect_to(to, a[0]->qp_num, rights);
		} else {
			to = receiver(a[0], queue, small, small);
			CHECK(!ibv_destroy_qp(other));
		}
	}
	receive_many(queue, 1);
	send_from(a[0], IBV_WR_SEND, 8);
	poll_one(small);
	CHECK(!ibv_destroy_qp(to) && !ibv_destroy_srq(queue) && !ibv_destroy_cq(small));
}

/* A queue that has a completion queue of its own, which is not that of the queue pair. */
static void own_completions(void)
{
	struct ibv_cq_init_attr_ex cqe = {
		.cqe = 31, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_TM_INFO,
	};
	struct ibv_cq *large = ibv_cq_ex_to_cq(ibv_create_cq_ex(context, &cqe));
	struct ibv_cq *small = small_queue(3);
	struct ibv_srq_init_attr_ex ask = {
		.attr = { .max_wr = 16, .max_sge = 1 }, .srq_type = IBV_SRQT_TM, .pd = pd,
		.cq = large, .tm_cap = { .max_num_tags = 8, .max_ops = 16 },
		.comp_mask = IBV_SRQ_INIT_ATTR_TYPE | IBV_SRQ_INIT_ATTR_PD |
			     IBV_SRQ_INIT_ATTR_CQ | IBV_SRQ_INIT_ATTR_TM,
	};
	struct ibv_srq *queue = ibv_create_srq_ex(context, &ask);
	struct ibv_qp *to;

	CHECK(large);
	/* libmlx5 creates none on Ethernet. */
	if (queue) {
		to = receiver(a[0], queue, small, small);
		receive_many(queue, 8);
		write_from(to);
		poll_one(small);
		CHECK(!ibv_destroy_qp(to) && !ibv_destroy_srq(queue));
	}
	CHECK(!ibv_destroy_cq(large) && !ibv_destroy_cq(small));
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
	else if (!strcmp(mistake, "freed"))
		free_early();
	else if (!strcmp(mistake, "domain"))
		domain(right);
	else if (!strcmp(mistake, "refused"))
		refuse();
	else if (!strcmp(mistake, "small-datagrams"))
		fill_datagrams();
	else if (!strncmp(mistake, "small-", 6))
		fill(mistake + 6);
	else if (!strncmp(mistake, "arrived-", 8))
		arrive(mistake + 8);
	else if (!strcmp(mistake, "one-after-another"))
		come();
	else if (!strncmp(mistake, "end-", 4))
		end(!strcmp(mistake, "end-reset"));
	else if (!strcmp(mistake, "own-completions"))
		own_completions();
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
