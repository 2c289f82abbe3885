/*
 * For debuggers, and for programs that are compiled or run with checks: one thread sends messages
 * from memory of the heap to the queue pair itself, another one waits for their completions, by
 * events and by polls in turn. Exit status 0 if all arrived.
 */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "loopback.h"

enum { ROUNDS = 20, LENGTH = 3000 };

static struct ibv_comp_channel *channel;
static struct ibv_cq *cq;
static struct ibv_qp *qp;
static struct ibv_mr *mr;
static unsigned char *buffer;

static void *sends(void *unused)
{
	for (int round = 0; round < ROUNDS; round++) {
		struct ibv_sge to = { (uintptr_t)buffer + LENGTH, LENGTH, mr->lkey };
		struct ibv_recv_wr receive = { .sg_list = &to, .num_sge = 1 }, *bad_receive;
		struct ibv_sge from = { (uintptr_t)buffer, LENGTH, mr->lkey };
		struct ibv_send_wr send = { .sg_list = &from, .num_sge = 1,
					    .opcode = IBV_WR_SEND_WITH_IMM,
					    .send_flags = IBV_SEND_SIGNALED }, *bad_send;
		struct ibv_cq *of;
		struct ibv_wc wc;
		void *context;

		memset(buffer, round, LENGTH);
		CHECK(!ibv_req_notify_cq(cq, 0));
		CHECK(!ibv_post_recv(qp, &receive, &bad_receive));
		CHECK(!ibv_post_send(qp, &send, &bad_send));
		if (round % 2) {
			CHECK(!ibv_get_cq_event(channel, &of, &context) && of == cq);
			ibv_ack_cq_events(cq, 1);
		}
		for (int found = 0; found < 2;) {
			int count = ibv_poll_cq(cq, 1, &wc);

			CHECK(count >= 0 && (!count || !wc.status));
			found += count;
		}
		CHECK(!memcmp(buffer, buffer + LENGTH, LENGTH) && buffer[LENGTH] == round);
	}
	return unused;
}

int main(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;
	pthread_t thread;
	struct ibv_pd *pd;

	CHECK(list && list[0] && (context = ibv_open_device(list[0])));
	ibv_free_device_list(list);
	CHECK((buffer = malloc(2 * LENGTH)));
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((mr = ibv_reg_mr(pd, buffer, 2 * LENGTH, IBV_ACCESS_LOCAL_WRITE)));
	CHECK((channel = ibv_create_comp_channel(context)));
	CHECK((cq = ibv_create_cq(context, 8, NULL, channel, 0)));
	qp = ibv_create_qp(pd, &(struct ibv_qp_init_attr){
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = { 4, 4, 1, 1 } });
	CHECK(qp);
	connect_to_itself(qp, (struct ibv_qp_attr){ .timeout = 14, .retry_cnt = 7, .rnr_retry = 7,
						   .min_rnr_timer = 12 });
	CHECK(!pthread_create(&thread, NULL, sends, NULL) && !pthread_join(thread, NULL));
	CHECK(!ibv_destroy_qp(qp) && !ibv_destroy_cq(cq) && !ibv_destroy_comp_channel(channel));
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(pd) && !ibv_close_device(context));
	free(buffer);
	puts("well");
	return 0;
}
