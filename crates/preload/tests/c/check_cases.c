/*
 * Makes one error of a program, the first argument, that no device reports; with a second
 * argument, does the same as it should be done. Queue pair a sends, b receives.
 */
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "check.h"
#include "loopback.h"

#define LENGTH 131072

static char *memory, *target;
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq, *receives;
static struct ibv_cq_ex *extended;
static struct ibv_mr *mr, *target_mr;
static struct ibv_qp *a, *b;
static int right;

static struct ibv_qp_attr rights = {
	.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			   IBV_ACCESS_REMOTE_ATOMIC,
	.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 1,
};

static struct ibv_qp *queue_pair_of(struct ibv_cq *sends, struct ibv_cq *received)
{
	struct ibv_qp_init_attr_ex ask = {
		.send_cq = sends, .recv_cq = received, .qp_type = IBV_QPT_RC, .pd = pd,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2,
			 .max_recv_sge = 1, .max_inline_data = 64 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_RDMA_WRITE | IBV_QP_EX_WITH_SEND,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(context, &ask);

	CHECK(qp);
	return qp;
}

static struct ibv_qp *queue_pair(struct ibv_cq *sends)
{
	return queue_pair_of(sends, receives);
}

/* Connects a queue pair that has another peer. */
static void connect_to_again(struct ibv_qp *qp, struct ibv_qp *to)
{
	struct ibv_qp_attr reset = { .qp_state = IBV_QPS_RESET };

	CHECK(!ibv_modify_qp(qp, &reset, IBV_QP_STATE));
	connect_to(qp, to->qp_num, rights);
}

static void poll_one(struct ibv_cq *from)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(from, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

/* As above, also of a work request that has failed. */
static void poll_any(struct ibv_cq *from)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(from, 1, &wc))
		;
}

/* Lets the device send again what waits for a receive. */
static void wait_for_device(void)
{
	struct ibv_wc wc;

	for (int n = 0; n < 50; n++) {
		CHECK(!ibv_poll_cq(cq, 1, &wc));
		usleep(1000);
	}
}

static void poll_extended(void)
{
	struct ibv_poll_cq_attr none = { 0 };

	while (ibv_start_poll(extended, &none) == ENOENT)
		;
	CHECK(extended->status == IBV_WC_SUCCESS);
	ibv_end_poll(extended);
}

/* Posts `count` elements of 64 bytes of a region, 4096 bytes apart. */
static void post_of(struct ibv_qp *qp, struct ibv_mr *of, uint64_t address, int count,
		    enum ibv_wr_opcode opcode, unsigned flags)
{
	struct ibv_sge list[2] = { { address, 64, of->lkey }, { address + 4096, 64, of->lkey } };
	struct ibv_send_wr wr = { .wr_id = 0x5e, .sg_list = list, .num_sge = count,
				  .opcode = opcode, .send_flags = flags }, *bad;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		list[0].length = 8;
		wr.wr.atomic.remote_addr = (uintptr_t)target;
		wr.wr.atomic.rkey = target_mr->rkey;
		wr.wr.atomic.compare_add = 1;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)target;
		wr.wr.rdma.rkey = target_mr->rkey;
	}
	CHECK(!ibv_post_send(qp, &wr, &bad));
}

static void post(enum ibv_wr_opcode opcode, unsigned flags)
{
	post_of(a, mr, (uintptr_t)memory, 1, opcode, flags);
}

static void receive(struct ibv_qp *qp, struct ibv_mr *of, char *into)
{
	struct ibv_sge list = { (uintptr_t)into, 64, of->lkey };
	struct ibv_recv_wr wr = { .sg_list = &list, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(qp, &wr, &bad));
}

/* Changes memory before or, if that is right, after a completion is polled. */
static void change(char *at)
{
	if (right)
		poll_one(cq);
	*at += 1;
	if (!right)
		poll_one(cq);
}

static struct ibv_cq *unacknowledged;

static void acknowledge(int number)
{
	(void)number;
	ibv_ack_cq_events(unacknowledged, 1);
}

/* Destroys a completion queue with an event, which is acknowledged before or, so that this ends,
 * by a signal handler meanwhile. */
static void events(void)
{
	struct ibv_comp_channel *channel = ibv_create_comp_channel(context);
	struct ibv_cq *event_of;
	struct ibv_qp *from;
	void *program;

	CHECK(channel);
	unacknowledged = ibv_create_cq(context, 32, NULL, channel, 0);
	CHECK(unacknowledged && !ibv_req_notify_cq(unacknowledged, 0));
	from = queue_pair(unacknowledged);
	connect_to(from, b->qp_num, rights);
	connect_to_again(b, from);
	post_of(from, mr, (uintptr_t)memory, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
	CHECK(!ibv_get_cq_event(channel, &event_of, &program));
	poll_one(unacknowledged);
	CHECK(!ibv_destroy_qp(from));
	if (right)
		ibv_ack_cq_events(unacknowledged, 1);
	signal(SIGALRM, acknowledge);
	alarm(right ? 0 : 2);
	CHECK(!ibv_destroy_cq(unacknowledged));
	CHECK(!ibv_destroy_comp_channel(channel));
}

/* Builds a write without ibv_wr_start of this thread. */
static void *build(void *qp)
{
	struct ibv_qp_ex *ex = qp;

	ex->wr_id = 0x72;
	ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_rdma_write(ex, target_mr->rkey, (uintptr_t)target);
	ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 64);
	return NULL;
}

/* Uses an object after it was destroyed. */
static void again(const char *what)
{
	struct ibv_send_wr wr = { .opcode = IBV_WR_RDMA_WRITE }, *bad_send;
	struct ibv_recv_wr receiving = { 0 }, *bad_receive;
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_cq *other = ibv_create_cq(context, 32, NULL, NULL, 0);
	struct ibv_qp *qp = queue_pair(cq);
	struct ibv_mr *region = ibv_reg_mr(pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_pd *domain = ibv_alloc_pd(context);
	struct ibv_wc wc;

	CHECK(other && region && domain);
	connect_to_itself(qp, rights);
	if (right) {
		CHECK(!ibv_post_recv(qp, &receiving, &bad_receive));
		CHECK(!ibv_modify_qp(qp, &error, IBV_QP_STATE) && !ibv_poll_cq(other, 1, &wc));
	}
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(other) && !ibv_dereg_mr(region));
	CHECK(!ibv_dealloc_pd(domain));
	if (right)
		return;
	if (!strcmp(what, "send"))
		CHECK(ibv_post_send(qp, &wr, &bad_send) && bad_send == &wr);
	else if (!strcmp(what, "receive"))
		CHECK(ibv_post_recv(qp, &receiving, &bad_receive) && bad_receive == &receiving);
	else if (!strcmp(what, "builder"))
		ibv_wr_start(ibv_qp_to_qp_ex(qp));
	else if (!strcmp(what, "modify"))
		CHECK(ibv_modify_qp(qp, &error, IBV_QP_STATE));
	else if (!strcmp(what, "poll"))
		CHECK(ibv_poll_cq(other, 1, &wc) < 0);
	else if (!strcmp(what, "queue-pair"))
		CHECK(ibv_destroy_qp(qp));
	else if (!strcmp(what, "completion-queue"))
		CHECK(ibv_destroy_cq(other));
	else if (!strcmp(what, "region"))
		CHECK(ibv_dereg_mr(region));
	else if (!strcmp(what, "domain"))
		CHECK(ibv_dealloc_pd(domain));
	else if (!strcmp(what, "register"))
		CHECK(!ibv_reg_mr(domain, memory, LENGTH, 0));
}

/* Posts four times, with room for three completions. */
static void overfill(struct ibv_cq *small, int how)
{
	struct ibv_qp *from = queue_pair_of(how == 'r' ? cq : small, how == 'r' ? small : receives);
	struct ibv_qp *second = how == '2' ? queue_pair(small) : NULL;
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(from);

	CHECK(small->cqe == (right ? 15 : 3));
	connect_to(from, b->qp_num, rights);
	connect_to_again(b, from);
	if (second)
		connect_to_itself(second, rights);
	if (how == 'b')
		ibv_wr_start(ex);
	for (int n = 0; n < 4; n++) {
		if (how == 'r') {
			receive(from, mr, memory);
		} else if (how == 'b') {
			build(ex);
		} else {
			post_of(n % 2 && second ? second : from, mr, (uintptr_t)memory, 1,
				IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		}
	}
	if (how == 'b')
		CHECK(!ibv_wr_complete(ex));
	for (int n = 0; n < 4; n++) {
		if (how == 'r') {
			post_of(b, target_mr, (uintptr_t)target, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
			poll_one(cq);
		}
		poll_one(small);
	}
	CHECK(!ibv_destroy_qp(from) && (!second || !ibv_destroy_qp(second)));
	CHECK(!ibv_destroy_cq(small));
}

/* A queue pair of another type, which sends to b or to itself. */
/* Creates one whose peer is another one, or itself. */
static struct ibv_qp *unreliable(struct ibv_qp *peer)
{
	struct ibv_qp_init_attr ask = {
		.send_cq = cq, .recv_cq = receives, .qp_type = IBV_QPT_UC,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2,
			 .max_recv_sge = 1 },
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &ask);
	struct ibv_qp_attr attr = rights;

	CHECK(qp);
	attr.qp_access_flags = IBV_ACCESS_REMOTE_WRITE;
	connect_to(qp, peer ? peer->qp_num : qp->qp_num, attr);
	return qp;
}

static struct ibv_srq *shared_queue(struct ibv_pd *of)
{
	struct ibv_srq_init_attr ask = { .attr = { .max_wr = 16, .max_sge = 1 } };

	return ibv_create_srq(of, &ask);
}

/* Makes errors of the same kinds by other functions. */
static void vary(const char *mistake)
{
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a);
	struct ibv_sge list[2] = { { (uintptr_t)memory, 64, mr->lkey },
				   { (uintptr_t)memory + 4096, 64, mr->lkey } };

	if (!strcmp(mistake, "list-builder") || !strcmp(mistake, "send-builder")) {
		receive(b, target_mr, target);
		list[1].length = *mistake == 's' ? 0 : 64;
		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		if (*mistake == 's')
			ibv_wr_send(ex);
		else
			ibv_wr_rdma_write(ex, target_mr->rkey, (uintptr_t)target);
		ibv_wr_set_sge_list(ex, *mistake == 's' ? 1 : 2, list);
		CHECK(!ibv_wr_complete(ex));
		change(memory + (*mistake == 's' ? 0 : 4096));
	} else if (!strcmp(mistake, "unreliable")) {
		/* What arrives at the queue pair itself would permit the change. */
		struct ibv_qp *peer = unreliable(NULL), *qp = unreliable(peer);

		post_of(qp, mr, (uintptr_t)memory, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		change(memory + 3);
		CHECK(!ibv_destroy_qp(qp));
		CHECK(!ibv_destroy_qp(peer));
	} else if (!strcmp(mistake, "restored-long")) {
		struct ibv_send_wr wr = { .sg_list = list, .num_sge = 1, .opcode = IBV_WR_SEND,
					  .send_flags = IBV_SEND_SIGNALED }, *bad;
		struct ibv_sge into = { (uintptr_t)target, LENGTH, target_mr->lkey };
		struct ibv_recv_wr receiving = { .sg_list = &into, .num_sge = 1 }, *bad_receive;

		list[0].length = LENGTH;
		CHECK(ibv_post_send(a, &wr, &bad) == 0);
		wait_for_device();
		memory[100] += !right;
		memory[LENGTH - 1] += !right;
		wait_for_device();
		CHECK(!ibv_post_recv(b, &receiving, &bad_receive));
		poll_one(receives);
		memory[100] -= !right;
		memory[LENGTH - 1] -= !right;
		poll_one(cq);
	} else if (!strcmp(mistake, "never-drains-builder")) {
		for (int n = 0; n < 1000; n++) {
			ibv_wr_start(ex);
			ex->wr_flags = right && n % 4 == 0 ? IBV_SEND_SIGNALED : 0;
			ibv_wr_rdma_write(ex, target_mr->rkey, (uintptr_t)target);
			ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 64);
			if (ibv_wr_complete(ex))
				break;
		}
	} else if (!strcmp(mistake, "another-domain-of-send")) {
		struct ibv_pd *another = ibv_alloc_pd(context);
		struct ibv_mr *other = ibv_reg_mr(right ? pd : another, memory, LENGTH, 0);
		struct ibv_wc wc;

		CHECK(other);
		receive(b, target_mr, target);
		post_of(a, other, (uintptr_t)memory, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		CHECK((wc.status == IBV_WC_SUCCESS) == right);
		CHECK(!ibv_dereg_mr(other) && !ibv_dealloc_pd(another));
	} else if (!strcmp(mistake, "another-context-of-receives")) {
		struct ibv_context *another = ibv_open_device(context->device);
		struct ibv_pd *of = ibv_alloc_pd(right ? context : another);
		struct ibv_srq *srq = shared_queue(of);
		struct ibv_qp_init_attr ask = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .srq = srq,
			.cap = { .max_send_wr = 1, .max_send_sge = 1 },
		};
		struct ibv_qp *qp;

		CHECK(srq);
		qp = ibv_create_qp(pd, &ask);
		CHECK(!!qp == right && (!qp || !ibv_destroy_qp(qp)));
		CHECK(!ibv_destroy_srq(srq) && !ibv_dealloc_pd(of));
		CHECK(!ibv_close_device(another));
	} else if (!strcmp(mistake, "window") || !strcmp(mistake, "again-window")) {
		struct ibv_mw *window = ibv_alloc_mw(pd, IBV_MW_TYPE_1);

		CHECK(window);
		if (right || *mistake == 'a')
			CHECK(!ibv_dealloc_mw(window));
		if (!right && *mistake == 'a')
			CHECK(ibv_dealloc_mw(window));
	} else {
		struct ibv_srq *srq = shared_queue(pd);
		struct ibv_srq_attr attr = { .srq_limit = 1 };

		CHECK(srq);
		if (right || strcmp(mistake, "shared-queue"))
			CHECK(!ibv_destroy_srq(srq));
		if (!right && !strcmp(mistake, "again-limit"))
			CHECK(ibv_modify_srq(srq, &attr, IBV_SRQ_LIMIT));
		else if (!right && !strcmp(mistake, "again-query"))
			CHECK(ibv_query_srq(srq, &attr));
	}
}

/* Frees the buffer of a work request before its completion is polled. */
static void free_early(const char *what)
{
	char *buffer = malloc(1024), *at = buffer + 512;
	struct ibv_mr *region = ibv_reg_mr(pd, buffer, 1024, IBV_ACCESS_LOCAL_WRITE);
	int is_answered = !strcmp(what, "answered");

	CHECK(buffer && region);
	if (!strcmp(what, "receive")) {
		receive(b, region, at);
	} else if (!strcmp(what, "read")) {
		/* Waits for a receive, as the read behind it. */
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		post_of(a, region, (uintptr_t)at, 1, IBV_WR_RDMA_READ, IBV_SEND_SIGNALED);
	} else {
		post_of(a, region, (uintptr_t)at, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
	}
	if (is_answered) {
		receive(a, target_mr, target + 4096);
		post_of(b, target_mr, (uintptr_t)target + 8192, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
		poll_one(receives);
	}
	if (is_answered || !right)
		free(buffer);
	if (!strcmp(what, "receive"))
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
	if (!strcmp(what, "read"))
		receive(b, target_mr, target + 8192);
	if (!strcmp(what, "receive") || !strcmp(what, "read"))
		poll_one(receives);
	if (is_answered || !strcmp(what, "read"))
		poll_one(cq);
	poll_one(cq);
	if (!is_answered && right)
		free(buffer);
	CHECK(!ibv_dereg_mr(region));
}

static void destroy(const char *left)
{
	CHECK(!ibv_destroy_qp(b));
	if (strcmp(left, "queue-pair") || right)
		CHECK(!ibv_destroy_qp(a));
	if (strcmp(left, "region") || right)
		CHECK(!ibv_dereg_mr(mr));
	CHECK(!ibv_dereg_mr(target_mr));
	if (strcmp(left, "queue-pair") || right) {
		CHECK(!ibv_destroy_cq(receives));
		if (strcmp(left, "completion-queue") || right)
			CHECK(!ibv_destroy_cq(cq));
	}
	if (right || (strcmp(left, "queue-pair") && strcmp(left, "region") &&
		      strcmp(left, "domain") && strcmp(left, "window") &&
		      strcmp(left, "shared-queue")))
		CHECK(!ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
}

int main(int count, char **arguments)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			IBV_ACCESS_REMOTE_ATOMIC;
	struct ibv_device **devices = ibv_get_device_list(NULL);
	const char *mistake = arguments[1];
	struct ibv_cq_init_attr_ex wanted = { .cqe = 32, .wc_flags = IBV_WC_EX_WITH_QP_NUM };
	struct ibv_mr *other;

	CHECK(count >= 2 && devices && devices[0]);
	right = count > 2;
	context = ibv_open_device(devices[0]);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	memory = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	target = mmap(NULL, LENGTH, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(pd && memory != MAP_FAILED && target != MAP_FAILED);
	mr = ibv_reg_mr(pd, memory, LENGTH, all);
	target_mr = ibv_reg_mr(pd, target, LENGTH, all);
	if (!strcmp(mistake, "extended")) {
		extended = ibv_create_cq_ex(context, &wanted);
		CHECK(extended);
		cq = ibv_cq_ex_to_cq(extended);
	} else {
		cq = ibv_create_cq(context, 32, NULL, NULL, 0);
	}
	receives = ibv_create_cq(context, 32, NULL, NULL, 0);
	CHECK(mr && target_mr && cq && receives);
	a = queue_pair(cq);
	b = queue_pair(cq);
	connect_to(a, b->qp_num, rights);
	connect_to(b, a->qp_num, rights);

	if (!strcmp(mistake, "write")) {
		post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		change(memory + 8);
	} else if (!strcmp(mistake, "send")) {
		receive(b, target_mr, target);
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		change(memory + 63);
	} else if (!strcmp(mistake, "immediate")) {
		receive(b, target_mr, target);
		post(IBV_WR_RDMA_WRITE_WITH_IMM, IBV_SEND_SIGNALED);
		change(memory);
	} else if (!strcmp(mistake, "unsignaled")) {
		post(IBV_WR_RDMA_WRITE, 0);
		post_of(a, mr, (uintptr_t)memory + 8192, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		change(memory);
	} else if (!strcmp(mistake, "element")) {
		post_of(a, mr, (uintptr_t)memory, 2, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		change(memory + 4096);
	} else if (!strcmp(mistake, "list")) {
		struct ibv_sge list[2] = { { (uintptr_t)memory, 64, mr->lkey },
					   { (uintptr_t)memory + 64, 64, mr->lkey } };
		struct ibv_send_wr wr[2] = {
			{ .next = &wr[1], .wr_id = 1, .sg_list = list, .num_sge = 1 },
			{ .wr_id = 2, .sg_list = list + 1, .num_sge = 1,
			  .send_flags = IBV_SEND_SIGNALED },
		}, *bad;

		for (int n = 0; n < 2; n++) {
			wr[n].wr.rdma.remote_addr = (uintptr_t)target;
			wr[n].wr.rdma.rkey = target_mr->rkey;
		}
		CHECK(!ibv_post_send(a, wr, &bad));
		change(memory + 64);
	} else if (!strcmp(mistake, "long")) {
		struct ibv_sge list = { (uintptr_t)memory, LENGTH, mr->lkey };
		struct ibv_send_wr wr = { .wr_id = 1, .sg_list = &list, .num_sge = 1,
					  .opcode = IBV_WR_RDMA_WRITE,
					  .send_flags = IBV_SEND_SIGNALED }, *bad;

		wr.wr.rdma.remote_addr = (uintptr_t)target;
		wr.wr.rdma.rkey = target_mr->rkey;
		CHECK(!ibv_post_send(a, &wr, &bad));
		change(memory + LENGTH - 1);
	} else if (!strcmp(mistake, "builder")) {
		struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a);

		ibv_wr_start(ex);
		ex->wr_id = 0x71;
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_rdma_write(ex, target_mr->rkey, (uintptr_t)target);
		ibv_wr_set_sge(ex, mr->lkey, (uintptr_t)memory, 64);
		CHECK(!ibv_wr_complete(ex));
		change(memory + 8);
	} else if (!strcmp(mistake, "extended")) {
		post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		if (right)
			poll_extended();
		memory[8]++;
		if (!right)
			poll_extended();
	} else if (!strcmp(mistake, "iova")) {
		other = ibv_reg_mr_iova(pd, memory, LENGTH, 0x100000, all);
		CHECK(other);
		post_of(a, other, 0x100000 + 4096, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		change(memory + 4096);
		CHECK(!ibv_dereg_mr(other));
	} else if (!strcmp(mistake, "unmapped")) {
		post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		if (right)
			poll_one(cq);
		CHECK(!munmap(memory, LENGTH));
		if (!right)
			poll_one(cq);
	} else if (!strncmp(mistake, "freed-", 6)) {
		free_early(mistake + 6);
	} else if (!strcmp(mistake, "deregistered")) {
		other = ibv_reg_mr(pd, memory, LENGTH, all);
		CHECK(other);
		memory[0] = 1;
		post_of(a, other, (uintptr_t)memory, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		/* The device needs the key until it has written this. */
		for (int n = 0; n < 100000 && !right && !((volatile char *)target)[0]; n++)
			usleep(100);
		if (right)
			poll_one(cq);
		CHECK(!ibv_dereg_mr(other));
		if (!right)
			poll_one(cq);
	} else if (!strcmp(mistake, "deregistered-early") || !strcmp(mistake, "reregistered")) {
		const int translation = IBV_REREG_MR_CHANGE_TRANSLATION;

		other = ibv_reg_mr(pd, memory, LENGTH, all);
		CHECK(other);
		post_of(a, other, (uintptr_t)memory, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		if (right)
			poll_one(cq);
		if (*mistake == 'r')
			CHECK(!ibv_rereg_mr(other, translation, NULL, target, LENGTH, 0));
		else
			CHECK(!ibv_dereg_mr(other));
		if (!right)
			poll_any(cq);
		if (*mistake == 'r') {
			/* The region is known by its new key. */
			if (right) {
				post_of(a, other, (uintptr_t)target, 1, IBV_WR_RDMA_WRITE,
					IBV_SEND_SIGNALED);
				poll_one(cq);
			}
			CHECK(!ibv_dereg_mr(other));
		}
	} else if (!strcmp(mistake, "deregistered-receive")) {
		other = ibv_reg_mr(pd, target, LENGTH, all);
		CHECK(other);
		receive(b, other, target);
		if (!right)
			CHECK(!ibv_dereg_mr(other));
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		poll_any(receives);
		if (right) {
			poll_one(cq);
			CHECK(!ibv_dereg_mr(other));
		}
	} else if (!strcmp(mistake, "never-drains")) {
		struct ibv_sge list = { (uintptr_t)memory, 64, mr->lkey };
		struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1,
					  .opcode = IBV_WR_RDMA_WRITE }, *bad;

		wr.wr.rdma.remote_addr = (uintptr_t)target;
		wr.wr.rdma.rkey = target_mr->rkey;
		for (int n = 0; n < 1000; n++) {
			wr.send_flags = right && n % 4 == 0 ? IBV_SEND_SIGNALED : 0;
			if (ibv_post_send(a, &wr, &bad))
				break;
		}
	} else if (!strncmp(mistake, "small-", 6)) {
		overfill(ibv_create_cq(context, right ? 15 : 3, NULL, NULL, 0), mistake[6]);
	} else if (!strcmp(mistake, "unacknowledged")) {
		events();
	} else if (!strcmp(mistake, "another-domain")) {
		struct ibv_pd *another = ibv_alloc_pd(context);
		struct ibv_wc wc;

		CHECK(another);
		other = ibv_reg_mr(right ? pd : another, memory, LENGTH, all);
		CHECK(other);
		post_of(a, other, (uintptr_t)memory, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		while (!ibv_poll_cq(cq, 1, &wc))
			;
		CHECK(wc.status == (right ? IBV_WC_SUCCESS : IBV_WC_LOC_PROT_ERR));
		CHECK(!ibv_dereg_mr(other) && !ibv_dealloc_pd(another));
	} else if (!strcmp(mistake, "no-start")) {
		struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a);

		for (int n = 0; n < 2; n++) {
			if (right || n == 0)
				ibv_wr_start(ex);
			build(ex);
			/* A provider may refuse it. */
			if (ibv_wr_complete(ex) && !right && n)
				break;
			poll_one(cq);
		}
	} else if (!strcmp(mistake, "start-of-another")) {
		struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a);
		pthread_t thread;

		ibv_wr_start(ex);
		if (right) {
			build(ex);
		} else {
			CHECK(!pthread_create(&thread, NULL, build, ex));
			CHECK(!pthread_join(thread, NULL));
		}
		CHECK(!ibv_wr_complete(ex));
		poll_one(cq);
	} else if (!strcmp(mistake, "restored") || !strcmp(mistake, "resent")) {
		/* b has no receive at first: the device reads the buffer again. */
		int answers = !strcmp(mistake, "resent");

		memory[0] = 1;
		if (answers)
			receive(a, mr, memory + 4096);
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		wait_for_device();
		memory[8] += !right;
		wait_for_device();
		receive(b, target_mr, target);
		poll_one(receives);
		memory[8] -= !right;
		if (answers) {
			post_of(b, target_mr, (uintptr_t)target, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
			poll_one(receives);
			poll_one(cq);
		}
		poll_one(cq);
	} else if (!strcmp(mistake, "read-into") || !strcmp(mistake, "atomic-into")) {
		/* The read waits for the send before it, which waits for a receive. */
		post(IBV_WR_SEND, 0);
		post_of(a, mr, (uintptr_t)memory + 4096, 1,
			*mistake == 'r' ? IBV_WR_RDMA_READ : IBV_WR_ATOMIC_FETCH_AND_ADD,
			IBV_SEND_SIGNALED);
		memory[4096 + 5] += !right;
		receive(b, target_mr, target + 64);
		poll_one(cq);
	} else if (!strcmp(mistake, "read-over")) {
		/* Another queue pair reads into the buffer of a send that waits for a receive. */
		struct ibv_qp *reader = queue_pair(cq);

		connect_to_itself(reader, rights);
		target[5] = 1;
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		post_of(reader, mr, (uintptr_t)memory + (right ? 4096 : 0), 1, IBV_WR_RDMA_READ,
			IBV_SEND_SIGNALED);
		poll_one(cq);
		receive(b, target_mr, target + 64);
		poll_one(cq);
		CHECK(!ibv_destroy_qp(reader));
	} else if (!strncmp(mistake, "again-", 6) && strcmp(mistake, "again-window") &&
		   strcmp(mistake, "again-limit") && strcmp(mistake, "again-query")) {
		again(mistake + 6);
	} else if (!strcmp(mistake, "another-context")) {
		struct ibv_context *another = ibv_open_device(devices[0]);
		struct ibv_pd *from = ibv_alloc_pd(right ? context : another);
		struct ibv_qp_init_attr ask = {
			.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC,
			.cap = { .max_send_wr = 1, .max_recv_wr = 1, .max_send_sge = 1,
				 .max_recv_sge = 1 },
		};
		struct ibv_qp *qp = ibv_create_qp(from, &ask);

		CHECK(!!qp == right);
		CHECK((!qp || !ibv_destroy_qp(qp)) && !ibv_dealloc_pd(from));
		CHECK(!ibv_close_device(another));
	/* What follows is right in either case. */
	} else if (!strcmp(mistake, "inline")) {
		post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED | IBV_SEND_INLINE);
		memory[8]++;
		poll_one(cq);
	} else if (!strcmp(mistake, "read")) {
		target[5] = 7;
		post(IBV_WR_RDMA_READ, IBV_SEND_SIGNALED);
		poll_one(cq);
		post(IBV_WR_ATOMIC_FETCH_AND_ADD, IBV_SEND_SIGNALED);
		poll_one(cq);
	} else if (!strcmp(mistake, "received")) {
		/* The answer is received into the buffer that was sent. */
		receive(a, mr, memory);
		receive(b, target_mr, target);
		memory[0] = 1;
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		poll_one(receives);
		target[0] = 2;
		post_of(b, target_mr, (uintptr_t)target, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
		poll_one(receives);
		CHECK(memory[0] == 2);
		poll_one(cq);
		poll_one(cq);
	} else if (!strcmp(mistake, "answered")) {
		/* The peer's answer tells that it has the data. */
		receive(a, mr, memory + 64);
		receive(b, target_mr, target);
		post(IBV_WR_SEND, IBV_SEND_SIGNALED);
		poll_one(receives);
		post_of(b, target_mr, (uintptr_t)target, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
		poll_one(receives);
		memory[0]++;
		poll_one(cq);
		poll_one(cq);
	} else if (!strcmp(mistake, "written")) {
		/* The device writes what it has sent, before its completion is polled. */
		receive(a, mr, memory + 64);
		post_of(b, target_mr, (uintptr_t)target, 1, IBV_WR_SEND, 0);
		poll_one(receives);
		memory[0] = 9;
		post(IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		poll_one(cq);
		CHECK(target[0] == 9);
		post_of(b, target_mr, (uintptr_t)target + 64, 1, IBV_WR_SEND, IBV_SEND_SIGNALED);
		receive(a, mr, memory + 128);
		poll_one(cq);
	} else if (!strcmp(mistake, "ignores-overrun")) {
		struct ibv_cq_init_attr_ex small = {
			.cqe = 3, .comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
			.flags = IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN,
		};
		struct ibv_cq_ex *ignores = ibv_create_cq_ex(context, &small);

		CHECK(ignores);
		right = 0;
		overfill(ibv_cq_ex_to_cq(ignores), 's');
	} else if (!strcmp(mistake, "ended")) {
		/* The device accesses no buffers of a queue pair that is in error. */
		struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
		struct ibv_wc wc;

		other = ibv_reg_mr(pd, memory, LENGTH, all);
		CHECK(other);
		post_of(a, other, (uintptr_t)memory, 1, IBV_WR_RDMA_WRITE, IBV_SEND_SIGNALED);
		for (int n = 0; n < 100; n++) {
			CHECK(!ibv_poll_cq(receives, 1, &wc));
			usleep(1000);
		}
		CHECK(!ibv_modify_qp(a, &error, IBV_QP_STATE));
		memory[0]++;
		CHECK(!ibv_dereg_mr(other));
		poll_one(cq);
	} else if (!strcmp(mistake, "left-at-exit")) {
		return 0;
	} else {
		vary(mistake);
	}
	if (!strcmp(mistake, "unmapped"))
		memory = NULL;
	destroy(mistake);
	return 0;
}
