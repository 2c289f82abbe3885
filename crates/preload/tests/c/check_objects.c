/*
 * As check_cases.c: errors in the use of receives, memory windows, asynchronous events and
 * threads.
 * Queue pair a sends, b receives.
 */
#include <infiniband/verbs.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

#include "check.h"
#include "loopback.h"

#define LENGTH 131072

static char memory[LENGTH] __attribute__((aligned(4096)));
static char target[2 * LENGTH] __attribute__((aligned(4096)));
static struct ibv_context *context;
static struct ibv_pd *pd;
static struct ibv_cq *cq, *receives;
static struct ibv_mr *mr, *target_mr;
static struct ibv_qp *a, *b;
static int right;

static struct ibv_qp_attr rights = {
	.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ,
	.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 1,
};

static struct ibv_qp *queue_pair(struct ibv_srq *srq)
{
	struct ibv_qp_init_attr_ex ask = {
		.send_cq = cq, .recv_cq = receives, .qp_type = IBV_QPT_RC, .pd = pd, .srq = srq,
		.cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2,
			 .max_recv_sge = 2 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS,
		.send_ops_flags = IBV_QP_EX_WITH_BIND_MW | IBV_QP_EX_WITH_LOCAL_INV,
	};
	struct ibv_qp *qp = ibv_create_qp_ex(context, &ask);

	CHECK(qp);
	return qp;
}

static void poll_one(struct ibv_cq *from)
{
	struct ibv_wc wc;

	while (!ibv_poll_cq(from, 1, &wc))
		;
	CHECK(wc.status == IBV_WC_SUCCESS);
}

static void send_from(struct ibv_qp *qp, int length)
{
	struct ibv_sge list = { (uintptr_t)memory, length, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;

	CHECK(!ibv_post_send(qp, &wr, &bad));
	poll_one(cq);
}

static void receive(uint64_t wr_id, struct ibv_sge *list, int count)
{
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = list, .num_sge = count }, *bad;

	CHECK(!ibv_post_recv(b, &wr, &bad));
}

/* Gets two messages of which the second one changes a byte of the first. */
static void overwrite(const char *how)
{
	int is_long = !strcmp(how, "long"), is_part = !strcmp(how, "part");
	int has_elements = !strcmp(how, "elements"), is_same = !strcmp(how, "same");
	int length = is_long ? LENGTH : 256;
	struct ibv_sge list[2] = { { (uintptr_t)target, length, target_mr->lkey },
				   { (uintptr_t)target + LENGTH, length, target_mr->lkey } };

	if (has_elements)
		list[0].length = list[1].length = 128;
	receive(1, list, has_elements ? 2 : 1);
	if (is_part)
		list[0].addr += 200;
	if (has_elements)
		list[0].addr += 1024;
	receive(2, list, has_elements ? 2 : 1);
	memset(memory, 1, length);
	send_from(a, length);
	if (right)
		poll_one(receives);
	if (!is_same)
		memory[is_part ? 10 : length - 1]++;
	send_from(a, length);
	if (!right)
		poll_one(receives);
	poll_one(receives);
}

static void post_window(struct ibv_send_wr *wr)
{
	struct ibv_send_wr *bad;

	wr->send_flags = IBV_SEND_SIGNALED;
	CHECK(!ibv_post_send(a, wr, &bad));
	poll_one(cq);
}

/* Deregisters a region to which a window is bound. */
static void window(const char *how)
{
	int is_type_1 = !strcmp(how, "1");
	struct ibv_mr *region = ibv_reg_mr(pd, memory, LENGTH, IBV_ACCESS_LOCAL_WRITE |
								       IBV_ACCESS_MW_BIND);
	struct ibv_mw *mw = ibv_alloc_mw(pd, is_type_1 ? IBV_MW_TYPE_1 : IBV_MW_TYPE_2);
	struct ibv_mw_bind_info info = { .mr = region, .addr = (uintptr_t)memory, .length = 4096,
					 .mw_access_flags = IBV_ACCESS_REMOTE_WRITE };
	struct ibv_mw_bind binding = { .send_flags = IBV_SEND_SIGNALED, .bind_info = info };
	struct ibv_send_wr bind = { .opcode = IBV_WR_BIND_MW };
	struct ibv_send_wr invalidate = { .opcode = IBV_WR_LOCAL_INV };
	struct ibv_qp_ex *ex = ibv_qp_to_qp_ex(a);

	CHECK(region && mw);
	if (is_type_1) {
		CHECK(!ibv_bind_mw(a, mw, &binding));
		poll_one(cq);
	} else if (!strcmp(how, "builder")) {
		ibv_wr_start(ex);
		ex->wr_flags = IBV_SEND_SIGNALED;
		ibv_wr_bind_mw(ex, mw, ibv_inc_rkey(mw->rkey), &info);
		CHECK(!ibv_wr_complete(ex));
		poll_one(cq);
	} else {
		bind.bind_mw.mw = mw;
		bind.bind_mw.rkey = ibv_inc_rkey(mw->rkey);
		bind.bind_mw.bind_info = info;
		post_window(&bind);
	}
	if (right && is_type_1) {
		binding.bind_info.length = 0;
		CHECK(!ibv_bind_mw(a, mw, &binding));
		poll_one(cq);
	} else if (right && !strcmp(how, "builder")) {
		CHECK(!ibv_dealloc_mw(mw));
	} else if (right) {
		invalidate.invalidate_rkey = bind.bind_mw.rkey;
		post_window(&invalidate);
	}
	CHECK(!ibv_dereg_mr(region));
	if (!right || strcmp(how, "builder"))
		CHECK(!ibv_dealloc_mw(mw));
}

static struct ibv_async_event event;

static void acknowledge(int number)
{
	(void)number;
	ibv_ack_async_event(&event);
}

/* Destroys an object with an event, which is acknowledged before or, so that this ends, by a
 * signal handler meanwhile. */
static void events(const char *of)
{
	struct ibv_srq_init_attr ask = { .attr = { .max_wr = 16, .max_sge = 1 } };
	struct ibv_srq_attr limit = { .srq_limit = 2 };
	struct ibv_sge list = { (uintptr_t)target, 256, target_mr->lkey };
	struct ibv_recv_wr wr = { .sg_list = &list, .num_sge = 1 }, *bad;
	struct ibv_qp_attr error = { .qp_state = IBV_QPS_ERR };
	struct ibv_srq *srq = ibv_create_srq(pd, &ask);
	int is_limit = !strcmp(of, "shared-queue");
	struct ibv_qp *qp;

	CHECK(srq);
	qp = queue_pair(srq);
	connect_to_itself(qp, rights);
	if (is_limit) {
		CHECK(!ibv_post_srq_recv(srq, &wr, &bad) && !ibv_post_srq_recv(srq, &wr, &bad));
		CHECK(!ibv_modify_srq(srq, &limit, IBV_SRQ_LIMIT));
		send_from(qp, 256);
		poll_one(receives);
	} else {
		CHECK(!ibv_modify_qp(qp, &error, IBV_QP_STATE));
	}
	CHECK(!ibv_get_async_event(context, &event));
	CHECK(event.event_type == (is_limit ? IBV_EVENT_SRQ_LIMIT_REACHED :
					      IBV_EVENT_QP_LAST_WQE_REACHED));
	signal(SIGALRM, acknowledge);
	if (right)
		ibv_ack_async_event(&event);
	else
		ualarm(300000, 0);
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_destroy_srq(srq));
}

static void *read_one(void *queue)
{
	struct ibv_poll_cq_attr none = { 0 };

	CHECK(!ibv_start_poll(queue, &none));
	ibv_end_poll(queue);
	return NULL;
}

static void *build_nothing(void *qp)
{
	ibv_wr_start(qp);
	ibv_wr_abort(qp);
	return NULL;
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static pthread_barrier_t barrier;
static struct ibv_qp *common_qp;
static struct ibv_cq *common_cq;
static const char *common_call;
static int has_mutex;

/* Posts take milliseconds, in which another thread runs on a busy machine, too. */
#define LONG (256 << 10)

static char long_memory[LONG], long_target[LONG];
static struct ibv_mr *long_mr, *long_target_mr;

static uint64_t milliseconds(void)
{
	struct timespec now;

	CHECK(!clock_gettime(CLOCK_MONOTONIC, &now));
	return now.tv_sec * 1000ull + now.tv_nsec / 1000000;
}

/* Calls one function again and again, at the same time as another thread: short calls for so long
 * that both threads run. */
static void *call_again(void *unused)
{
	struct ibv_sge list[8];
	struct ibv_send_wr wr[8] = { 0 }, *bad;
	struct ibv_recv_wr receive = { 0 }, *bad_receive;
	int is_short = strcmp(common_call, "send");
	uint64_t end = milliseconds() + 400;
	struct ibv_wc wc;

	for (int n = 0; n < 8; n++) {
		list[n] = (struct ibv_sge){ (uintptr_t)long_memory, LONG, long_mr->lkey };
		wr[n] = (struct ibv_send_wr){
			.sg_list = &list[n], .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
			.next = n < 7 ? &wr[n + 1] : NULL,
			.send_flags = n < 7 ? 0 : IBV_SEND_SIGNALED,
			.wr.rdma = { (uintptr_t)long_target, long_target_mr->rkey },
		};
	}
	pthread_barrier_wait(&barrier);
	for (int n = 0; is_short ? n % 1024 || milliseconds() < end : n < 50; n++) {
		if (!is_short)
			pthread_barrier_wait(&barrier);
		if (has_mutex)
			pthread_mutex_lock(&mutex);
		if (!strcmp(common_call, "poll"))
			CHECK(!ibv_poll_cq(common_cq, 1, &wc));
		else if (is_short)
			ibv_post_recv(common_qp, &receive, &bad_receive);
		else
			CHECK(!ibv_post_send(common_qp, wr, &bad));
		if (has_mutex)
			pthread_mutex_unlock(&mutex);
		while (!strcmp(common_call, "send") && !ibv_poll_cq(cq, 1, &wc))
			;
	}
	return unused;
}

static struct ibv_cq_ex *extended;
static struct ibv_td *td;
static struct ibv_pd *parent;

/* Creates a completion queue, without a lock where that is the mistake. */
static void make_queue(void)
{
	struct ibv_cq_init_attr_ex wanted = {
		.cqe = 32, .wc_flags = IBV_WC_EX_WITH_QP_NUM,
		.comp_mask = IBV_CQ_INIT_ATTR_MASK_FLAGS,
		.flags = !right || has_mutex ? IBV_CREATE_CQ_ATTR_SINGLE_THREADED : 0,
	};

	extended = ibv_create_cq_ex(context, &wanted);
	CHECK(extended);
}

/* The same, a protection domain. */
static void make_domain(void)
{
	struct ibv_td_init_attr no_attributes = { 0 };
	struct ibv_parent_domain_init_attr of = { .pd = pd };
	struct ibv_pd *before;

	td = ibv_alloc_td(context, &no_attributes);
	CHECK(td);
	of.td = td;
	/* The next one may have its address. */
	before = ibv_alloc_parent_domain(context, &of);
	CHECK(before && !ibv_dealloc_pd(before));
	if (right && !has_mutex)
		of.td = NULL;
	parent = ibv_alloc_parent_domain(context, &of);
	CHECK(parent);
}

static void destroy_both(void)
{
	CHECK(!extended || !ibv_destroy_cq(ibv_cq_ex_to_cq(extended)));
	CHECK(!parent || (!ibv_dealloc_pd(parent) && !ibv_dealloc_td(td)));
}

/* Uses an object without a lock in two threads at once; or one with a lock, or with a lock of the
 * program. */
static void calls(const char *what)
{
	struct ibv_pd *domain = pd;
	pthread_t thread;

	if (parent)
		pd = parent;
	common_qp = queue_pair(NULL);
	pd = domain;
	common_cq = extended ? ibv_cq_ex_to_cq(extended) : NULL;
	common_call = what;
	long_mr = ibv_reg_mr(domain, long_memory, LONG, IBV_ACCESS_LOCAL_WRITE);
	long_target_mr = ibv_reg_mr(domain, long_target, LONG, IBV_ACCESS_LOCAL_WRITE |
				    IBV_ACCESS_REMOTE_WRITE);
	CHECK(long_mr && long_target_mr);
	connect_to_itself(common_qp, rights);
	CHECK(!pthread_barrier_init(&barrier, NULL, 2));
	CHECK(!pthread_create(&thread, NULL, call_again, NULL));
	call_again(NULL);
	CHECK(!pthread_join(thread, NULL));
	CHECK(!ibv_destroy_qp(common_qp));
	CHECK(!ibv_dereg_mr(long_mr) && !ibv_dereg_mr(long_target_mr));
}

/* Uses an object in two threads at once: with a lock, or without. */
static void threads(const char *what)
{
	struct ibv_pd *domain = pd;
	struct ibv_cq *common = cq;
	struct ibv_poll_cq_attr none = { 0 };
	struct ibv_sge list = { (uintptr_t)memory, 8, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &list, .num_sge = 1, .opcode = IBV_WR_RDMA_WRITE,
				  .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_qp *qp;
	pthread_t thread;

	cq = ibv_cq_ex_to_cq(extended);
	pd = parent;
	qp = queue_pair(NULL);
	cq = common;
	pd = domain;
	connect_to_itself(qp, rights);
	wr.wr.rdma.remote_addr = (uintptr_t)target;
	wr.wr.rdma.rkey = target_mr->rkey;
	for (int n = 0; n < 2; n++)
		CHECK(!ibv_post_send(qp, &wr, &bad));
	if (!strcmp(what, "poll")) {
		/* Both completions are there. */
		usleep(200000);
		while (ibv_start_poll(extended, &none))
			;
		CHECK(!pthread_create(&thread, NULL, read_one, extended));
		usleep(100000);
		ibv_end_poll(extended);
	} else {
		ibv_wr_start(ibv_qp_to_qp_ex(qp));
		CHECK(!pthread_create(&thread, NULL, build_nothing, ibv_qp_to_qp_ex(qp)));
		usleep(100000);
		ibv_wr_abort(ibv_qp_to_qp_ex(qp));
	}
	CHECK(!pthread_join(thread, NULL));
	CHECK(!ibv_destroy_qp(qp));
}

int main(int count, char **arguments)
{
	const int all = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
	struct ibv_device **devices = ibv_get_device_list(NULL);
	const char *mistake = arguments[1];
	int is_first;

	CHECK(count >= 2 && devices && devices[0]);
	right = count > 2;
	if (!strncmp(mistake, "mutex-", 6)) {
		has_mutex = right = 1;
		mistake += 6;
	}
	is_first = !strncmp(mistake, "first-", 6);
	mistake += is_first ? 6 : 0;
	context = ibv_open_device(devices[0]);
	CHECK(context);
	/* Of the context's objects the first one; a domain before there is a completion queue. */
	if (is_first && strstr(mistake, "-poll"))
		make_queue();
	pd = ibv_alloc_pd(context);
	CHECK(pd);
	if (is_first && !extended)
		make_domain();
	mr = ibv_reg_mr(pd, memory, LENGTH, all);
	target_mr = ibv_reg_mr(pd, target, sizeof(target), all);
	cq = ibv_create_cq(context, 32, NULL, NULL, 0);
	receives = ibv_create_cq(context, 32, NULL, NULL, 0);
	CHECK(mr && target_mr && cq && receives);
	a = queue_pair(NULL);
	b = queue_pair(NULL);
	connect_to(a, b->qp_num, rights);
	connect_to(b, a->qp_num, rights);
	if (!is_first && (!strncmp(mistake, "threads-", 8) || !strncmp(mistake, "calls-", 6))) {
		make_queue();
		make_domain();
	}
	if (!strncmp(mistake, "overwritten-", 12))
		overwrite(mistake + 12);
	else if (!strncmp(mistake, "threads-", 8))
		threads(mistake + 8);
	else if (!strncmp(mistake, "calls-", 6))
		calls(mistake + 6);
	else if (!strncmp(mistake, "window-", 7))
		window(mistake + 7);
	else
		events(mistake);
	destroy_both();
	CHECK(!ibv_destroy_qp(a) && !ibv_destroy_qp(b));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dereg_mr(target_mr));
	CHECK(!ibv_destroy_cq(cq) && !ibv_destroy_cq(receives) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	return 0;
}
