/* SPDX-License-Identifier: MIT */
/*
 * The counters of a ConnectX's port in sysfs count traffic of known size between two queue
 * pairs of one port; compiled WITH_CM also a connection to 127.0.0.1. Without common.h.
 */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdint.h>
#include <stdlib.h>
#ifdef WITH_CM
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#endif

#include "check.h"
#include "loopback.h"

#define MTU 1024
#define WRITES 10
#define LENGTH 10000
#define PACKETS (WRITES * ((LENGTH + MTU - 1) / MTU))
/* At most this many bytes of headers in a packet. */
#define HEADERS 100

static struct ibv_context *context;
static struct ibv_cq *cq;
static struct ibv_mr *mr;
static struct ibv_qp *a, *b;
static char memory[2 * LENGTH] __attribute__((aligned(8)));

static const struct ibv_qp_attr ATTR = {
	.qp_access_flags = IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ |
			   IBV_ACCESS_REMOTE_ATOMIC,
	.timeout = 14, .retry_cnt = 7, .rnr_retry = 7, .min_rnr_timer = 1,
};

static uint64_t counter(const char *name)
{
	char path[256], text[64] = "";
	int fd;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/%s",
		 ibv_get_device_name(context->device), name);
	CHECK((fd = open(path, O_RDONLY)) >= 0);
	CHECK(read(fd, text, sizeof text - 1) > 0);
	close(fd);
	return strtoull(text, NULL, 10);
}

static uint64_t hw(const char *name)
{
	char path[64];

	/* Linux reads them anew every 12 ms at most. */
	usleep(20000);
	snprintf(path, sizeof path, "hw_counters/%s", name);
	return counter(path);
}

static void is(const char *name, uint64_t found, uint64_t least, uint64_t most)
{
	if (found < least || found > most) {
		fprintf(stderr, "%s: %llu is not in %llu..%llu\n", name,
			(unsigned long long)found, (unsigned long long)least,
			(unsigned long long)most);
		exit(1);
	}
}

static struct ibv_qp *new_qp(void)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RC, .cap = {16, 16, 1, 1, 0},
	};
	struct ibv_qp *qp = ibv_create_qp(mr->pd, &init);

	CHECK(qp);
	return qp;
}

static void reset(struct ibv_qp *qp)
{
	CHECK(!ibv_modify_qp(qp, &(struct ibv_qp_attr){.qp_state = IBV_QPS_RESET}, IBV_QP_STATE));
}

static void reconnect(struct ibv_qp_attr attr)
{
	reset(a);
	reset(b);
	connect_to(a, b->qp_num, attr);
	connect_to(b, a->qp_num, attr);
}

static enum ibv_wc_status run(enum ibv_wr_opcode opcode, uint32_t length)
{
	struct ibv_sge sge = {(uintptr_t)memory, length, mr->lkey};
	struct ibv_send_wr wr = {
		.opcode = opcode, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_SIGNALED,
	}, *bad;
	struct ibv_wc wc;
	int n;

	if (opcode == IBV_WR_ATOMIC_FETCH_AND_ADD) {
		wr.wr.atomic.remote_addr = (uintptr_t)memory + LENGTH;
		wr.wr.atomic.rkey = mr->rkey;
	} else {
		wr.wr.rdma.remote_addr = (uintptr_t)memory + LENGTH;
		wr.wr.rdma.rkey = mr->rkey;
	}
	CHECK(!ibv_post_send(a, &wr, &bad));
	while ((n = ibv_poll_cq(cq, 1, &wc)) == 0)
		;
	CHECK(n == 1);
	return wc.status;
}

static void requests(void)
{
	static const struct {
		const char *name;
		enum ibv_wr_opcode opcode;
		uint32_t length;
	} kinds[] = {
		{"rx_write_requests", IBV_WR_RDMA_WRITE, LENGTH},
		{"rx_read_requests", IBV_WR_RDMA_READ, LENGTH},
		{"rx_atomic_requests", IBV_WR_ATOMIC_FETCH_AND_ADD, 8},
	};

	for (int kind = 0; kind < 3; kind++) {
		uint64_t before = hw(kinds[kind].name);

		for (int i = 0; i < WRITES; i++)
			CHECK(run(kinds[kind].opcode, kinds[kind].length) == IBV_WC_SUCCESS);
		is(kinds[kind].name, hw(kinds[kind].name) - before, WRITES, WRITES);
	}
}

/* Each message has at most one acknowledgement. */
static void traffic(void)
{
	static const char *const packets[] = {
		"counters/port_xmit_packets", "counters/port_rcv_packets",
		"counters/unicast_xmit_packets", "counters/unicast_rcv_packets",
	};
	static const char *const data[] = {"counters/port_xmit_data", "counters/port_rcv_data"};
	uint64_t packets_before[4], data_before[2], multicasts;

	for (int i = 0; i < 4; i++)
		packets_before[i] = counter(packets[i]);
	for (int i = 0; i < 2; i++)
		data_before[i] = counter(data[i]);
	multicasts = counter("counters/multicast_xmit_packets");
	for (int i = 0; i < WRITES; i++)
		CHECK(run(IBV_WR_RDMA_WRITE, LENGTH) == IBV_WC_SUCCESS);
	for (int i = 0; i < 4; i++)
		is(packets[i], counter(packets[i]) - packets_before[i], PACKETS, PACKETS + WRITES);
	for (int i = 0; i < 2; i++)
		is(data[i], (counter(data[i]) - data_before[i]) * 4, WRITES * LENGTH + PACKETS * 16,
		   WRITES * LENGTH + (PACKETS + WRITES) * HEADERS);
	is("multicasts", counter("counters/multicast_xmit_packets") - multicasts, 0, 0);
}

/* A NAK and a time-out count while retries remain. */
static void retries(void)
{
	struct ibv_qp_attr attr = ATTR;
	uint64_t before = hw("rnr_nak_retry_err"), none = hw("out_of_buffer");

	attr.rnr_retry = 2;
	reconnect(attr);
	CHECK(run(IBV_WR_SEND, 8) == IBV_WC_RNR_RETRY_EXC_ERR);
	is("rnr_nak_retry_err", hw("rnr_nak_retry_err") - before, 2, 2);
	is("out_of_buffer", hw("out_of_buffer") - none, 3, 3);

	before = hw("local_ack_timeout_err");
	attr.timeout = 8;
	attr.retry_cnt = 2;
	reconnect(attr);
	reset(b);
	CHECK(run(IBV_WR_RDMA_WRITE, 8) == IBV_WC_RETRY_EXC_ERR);
	is("local_ack_timeout_err", hw("local_ack_timeout_err") - before, 2, 4);
}

#ifdef WITH_CM
static struct rdma_cm_id *expect(struct rdma_event_channel *channel, enum rdma_cm_event_type type)
{
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	CHECK(!rdma_get_cm_event(channel, &event) && event->event == type);
	id = event->id;
	CHECK(!rdma_ack_cm_event(event));
	return id;
}

static void connection(void)
{
	static const char *const messages[] = {"req", "rep", "rtu", "dreq", "drep", "rej"};
	static const char *const directories[] = {"cm_tx_msgs", "cm_rx_msgs"};
	struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(7471),
				      .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct ibv_qp_init_attr init = {.qp_type = IBV_QPT_RC, .cap = {4, 4, 1, 1, 0}};
	struct rdma_conn_param param = {.retry_count = 7};
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct rdma_cm_id *listener, *active, *passive;

	CHECK(channel && !rdma_create_id(channel, &listener, NULL, RDMA_PS_TCP));
	CHECK(!rdma_bind_addr(listener, (struct sockaddr *)&address) && !rdma_listen(listener, 1));
	CHECK(!rdma_create_id(channel, &active, NULL, RDMA_PS_TCP));
	CHECK(!rdma_resolve_addr(active, NULL, (struct sockaddr *)&address, 1000));
	expect(channel, RDMA_CM_EVENT_ADDR_RESOLVED);
	CHECK(!rdma_resolve_route(active, 1000));
	expect(channel, RDMA_CM_EVENT_ROUTE_RESOLVED);
	CHECK(!rdma_create_qp(active, NULL, &init) && !rdma_connect(active, &param));
	passive = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST);
	CHECK(!rdma_create_qp(passive, NULL, &init) && !rdma_accept(passive, &param));
	expect(channel, RDMA_CM_EVENT_ESTABLISHED);
	expect(channel, RDMA_CM_EVENT_ESTABLISHED);
	CHECK(!rdma_disconnect(active));
	while (expect(channel, RDMA_CM_EVENT_DISCONNECTED) == passive)
		CHECK(!rdma_disconnect(passive));
	for (int d = 0; d < 2; d++) {
		for (int m = 0; m < 6; m++) {
			char name[64];

			snprintf(name, sizeof name, "%s/%s", directories[d], messages[m]);
			is(name, counter(name), m < 5, m < 5);
		}
	}
}
#endif

int main(void)
{
	const char *wanted = getenv("RXE_DEV");
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_pd *pd;

	CHECK(list && *list);
	while (wanted && strcmp(ibv_get_device_name(*list), wanted))
		CHECK(*++list);
	CHECK((context = ibv_open_device(*list)));
	CHECK((pd = ibv_alloc_pd(context)));
	CHECK((cq = ibv_create_cq(context, 16, NULL, NULL, 0)));
	CHECK((mr = ibv_reg_mr(pd, memory, sizeof memory,
			       IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
				       IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC)));
	a = new_qp();
	b = new_qp();
	reconnect(ATTR);
	requests();
	traffic();
	retries();
#ifdef WITH_CM
	connection();
#endif
	puts("well");
	return 0;
}
