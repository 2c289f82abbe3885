/* SPDX-License-Identifier: MIT */
/*
 * What RDMA netlink says of this program's objects, as `rdma resource` and
 * `rdma statistic` show it. Without common.h.
 * usage: resources [ADDRESS [NUMBER OF QUEUE PAIRS]]; with an address, which is the device's, nothing
 * else uses the device. It is for an id of the connection manager, if this is compiled WITH_CM.
 */
#include <errno.h>
#include <infiniband/verbs.h>
#include <linux/netlink.h>
#include <rdma/rdma_netlink.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>
#ifdef WITH_CM
#include <arpa/inet.h>
#include <rdma/rdma_cma.h>
#endif

#include "check.h"

#define COMMAND(name)                                                         \
	RDMA_NL_GET_TYPE(RDMA_NL_NLDEV, RDMA_NLDEV_CMD_##name)
#define ATTR(name) RDMA_NLDEV_ATTR_##name
#define MOST 10000

static int nl;
static uint32_t device, port;
static const char *device_name;
static _Alignas(8) char buffer[65536];

static void ask(int command, int flags, int attribute, uint32_t value)
{
	const struct sockaddr_nl kernel = {.nl_family = AF_NETLINK};
	struct {
		struct nlmsghdr header;
		struct nlattr index;
		uint32_t device;
		struct nlattr attribute;
		uint32_t value;
		struct nlattr in;
		uint32_t port;
	} request = {
		{sizeof request, command, NLM_F_REQUEST | flags, 7, 0},
		{8, ATTR(DEV_INDEX)},
		device,
		{8, attribute},
		value,
		{8, ATTR(PORT_INDEX)},
		port,
	};

	if (!attribute) {
		request.attribute = request.in;
		request.value = port;
	}
	request.header.nlmsg_len -= 8 * (!attribute + !port);
	CHECK(sendto(nl, &request, request.header.nlmsg_len, 0,
		     (void *)&kernel, sizeof kernel) > 0);
}

/* An attribute of the list, or NULL. */
static struct nlattr *find(void *list, size_t length, int kind)
{
	for (char *at = list; at < (char *)list + length;) {
		struct nlattr *it = (void *)at;

		CHECK(it->nla_len >= 4);
		if ((it->nla_type & NLA_TYPE_MASK) == kind)
			return it;
		at += (it->nla_len + 3) & ~3;
	}
	return NULL;
}

static uint64_t number(struct nlattr *it)
{
	switch (it->nla_len - 4) {
	case 1:
		return *(uint8_t *)(it + 1);
	case 4:
		return *(uint32_t *)(it + 1);
	default:
		return *(uint64_t *)(it + 1);
	}
}

/* Attributes of an object. */
struct object {
	char bytes[2048];
	size_t length;
};

static bool has(struct object *object, int kind)
{
	return find(object->bytes, object->length, kind);
}

static uint64_t get(struct object *object, int kind)
{
	struct nlattr *it = find(object->bytes, object->length, kind);

	if (!it)
		fprintf(stderr, "attribute %d is missing\n", kind);
	CHECK(it);
	return number(it);
}

/* Finds this program's objects of a kind, and returns their number. */
static int list(int command, int table, struct object *found, int room)
{
	int count = 0;

	ask(command, NLM_F_DUMP, 0, 0);
	for (;;) {
		ssize_t length = recv(nl, buffer, sizeof buffer, 0);

		CHECK(length > 0);
		for (char *at = buffer; at < buffer + length;) {
			struct nlmsghdr *header = (void *)at;
			char *body = at + sizeof *header;
			size_t size = header->nlmsg_len - sizeof *header;
			struct nlattr *all;

			if (header->nlmsg_type == NLMSG_DONE)
				return count;
			CHECK(header->nlmsg_type == command);
			CHECK(number(find(body, size, ATTR(DEV_INDEX))) == device);
			all = find(body, size, table);
			CHECK(all);
			for (char *in = (char *)(all + 1);
			     in < (char *)all + all->nla_len;) {
				struct nlattr *entry = (void *)in;
				struct nlattr *pid =
					find(entry + 1, entry->nla_len - 4, ATTR(RES_PID));

				in += (entry->nla_len + 3) & ~3;
				if (!pid || number(pid) != getpid())
					continue;
				if (count < room) {
					found[count].length = entry->nla_len - 4;
					CHECK(found[count].length <= sizeof found->bytes);
					memcpy(found[count].bytes, entry + 1,
					       found[count].length);
				}
				count++;
			}
			at += (header->nlmsg_len + 3) & ~3;
		}
	}
}

/* Asks for one object. Returns the error. */
static int one(int command, int kind, uint32_t value, struct object *object)
{
	ssize_t length;
	struct nlmsghdr *header = (void *)buffer;

	ask(command, 0, kind, value);
	length = recv(nl, buffer, sizeof buffer, 0);
	CHECK(length > 0);
	if (header->nlmsg_type == NLMSG_ERROR)
		return -*(int *)(header + 1);
	CHECK(header->nlmsg_type == command);
	object->length = header->nlmsg_len - sizeof *header;
	CHECK(object->length <= sizeof object->bytes);
	memcpy(object->bytes, header + 1, object->length);
	return 0;
}

static const char *const kinds[] = {"pd", "cq", "qp", "cm_id", "mr", "ctx", "srq"};

/* The numbers of objects of all programs. */
static void summary(uint64_t counts[7])
{
	struct object it;
	struct nlattr *all;
	int kind = 0;

	CHECK(!one(COMMAND(RES_GET), 0, 0, &it));
	all = find(it.bytes, it.length, ATTR(RES_SUMMARY));
	CHECK(all);
	for (char *at = (char *)(all + 1); at < (char *)all + all->nla_len; kind++) {
		struct nlattr *entry = (void *)at;
		size_t size = entry->nla_len - 4;
		struct nlattr *name =
			find(entry + 1, size, ATTR(RES_SUMMARY_ENTRY_NAME));

		CHECK(kind < 7 && !strcmp((char *)(name + 1), kinds[kind]));
		counts[kind] =
			number(find(entry + 1, size, ATTR(RES_SUMMARY_ENTRY_CURR)));
		at += (entry->nla_len + 3) & ~3;
	}
	CHECK(kind == 7);
}

static void counters(void)
{
	static const char *const names[] = {
		"rx_write_requests", "rx_read_requests", "rx_atomic_requests",
		"rx_dct_connect", "out_of_buffer", "out_of_sequence",
		"duplicate_request", "rnr_nak_retry_err", "packet_seq_err",
		"implied_nak_seq_err", "local_ack_timeout_err",
	};
	struct object it;
	struct nlattr *all;
	int at = 0;

	CHECK(!one(COMMAND(STAT_GET), ATTR(PORT_INDEX), 1, &it));
	all = find(it.bytes, it.length, ATTR(STAT_HWCOUNTERS));
	CHECK(all);
	for (char *in = (char *)(all + 1); in < (char *)all + all->nla_len; at++) {
		struct nlattr *entry = (void *)in;
		size_t size = entry->nla_len - 4;
		struct nlattr *name =
			find(entry + 1, size, ATTR(STAT_HWCOUNTER_ENTRY_NAME));

		CHECK(find(entry + 1, size, ATTR(STAT_HWCOUNTER_ENTRY_VALUE)));
		CHECK(at >= 11 || !strcmp((char *)(name + 1), names[at]));
		in += (entry->nla_len + 3) & ~3;
	}
	CHECK(at >= 11);
	CHECK(one(COMMAND(STAT_GET), ATTR(PORT_INDEX), 2, &it) == EINVAL);
}

static struct ibv_qp *new_qp(struct ibv_pd *pd, struct ibv_cq *cq, struct ibv_srq *srq,
			     enum ibv_qp_type type)
{
	struct ibv_qp_init_attr init = {
		.send_cq = cq,
		.recv_cq = cq,
		.srq = srq,
		.cap = {2, srq ? 0 : 2, 1, srq ? 0 : 1, 0},
		.qp_type = type,
	};
	struct ibv_qp *qp = ibv_create_qp(pd, &init);

	CHECK(qp);
	return qp;
}

static void objects(struct ibv_device *of, int count, bool alone)
{
	static struct object found[4];
	uint64_t before[7], now[7];
	static char memory[3000];
	struct ibv_srq_init_attr shared = {.attr = {8, 1, 0}};
	struct ibv_qp_attr attr = {.qp_state = IBV_QPS_INIT, .port_num = 1};
	static struct ibv_qp *many[MOST];
	struct ibv_context *context;
	struct ibv_pd *pd;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	struct ibv_srq *srq;
	struct ibv_qp *rc, *ud;
	uint32_t pdn, cqn, ctxn;

	summary(before);
	context = ibv_open_device(of);
	CHECK(context);
	pd = ibv_alloc_pd(context);
	cq = ibv_create_cq(context, 100, NULL, NULL, 0);
	mr = ibv_reg_mr(pd, memory, sizeof memory, IBV_ACCESS_LOCAL_WRITE);
	srq = ibv_create_srq(pd, &shared);
	CHECK(pd && cq && mr && srq);
	rc = new_qp(pd, cq, srq, IBV_QPT_RC);
	ud = new_qp(pd, cq, NULL, IBV_QPT_UD);
	CHECK(!ibv_modify_qp(rc, &attr, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT |
						IBV_QP_ACCESS_FLAGS));
	summary(now);
	for (int i = 0; i < 7; i++) {
		static const int grown[7] = {1, 1, 2, 0, 1, 1, 1};

		/* The kernel has objects of its own. */
		CHECK(now[i] - before[i] == grown[i] || !alone);
		CHECK(now[i] >= grown[i]);
	}

	CHECK(list(COMMAND(RES_CTX_GET), ATTR(RES_CTX), found, 4) == 1);
	ctxn = get(found, ATTR(RES_CTXN));
	CHECK(list(COMMAND(RES_PD_GET), ATTR(RES_PD), found, 4) == 1);
	pdn = get(found, ATTR(RES_PDN));
	CHECK(get(found, ATTR(RES_USECNT)) == 4 && get(found, ATTR(RES_CTXN)) == ctxn);
	CHECK(get(found, ATTR(RES_LOCAL_DMA_LKEY)) == 0);
	CHECK(list(COMMAND(RES_CQ_GET), ATTR(RES_CQ), found, 4) == 1);
	cqn = get(found, ATTR(RES_CQN));
	CHECK(get(found, ATTR(RES_CQE)) == cq->cqe && get(found, ATTR(RES_USECNT)) == 4);
	CHECK(get(found, ATTR(DEV_DIM)) == 0 && get(found, ATTR(RES_CTXN)) == ctxn);
	CHECK(list(COMMAND(RES_MR_GET), ATTR(RES_MR), found, 4) == 1);
	CHECK(get(found, ATTR(RES_RKEY)) == mr->rkey && get(found, ATTR(RES_LKEY)) == mr->lkey);
	CHECK(get(found, ATTR(RES_MRLEN)) == sizeof memory && get(found, ATTR(RES_PDN)) == pdn);
	CHECK(list(COMMAND(RES_SRQ_GET), ATTR(RES_SRQ), found, 4) == 1);
	CHECK(get(found, ATTR(RES_TYPE)) == 0 && get(found, ATTR(RES_PDN)) == pdn);
	{
		struct nlattr *qps = find(found->bytes, found->length, ATTR(RES_QP));
		struct nlattr *entry = qps + 1;

		CHECK(qps && (entry->nla_type & NLA_TYPE_MASK) == ATTR(RES_QP_ENTRY));
		CHECK(number(find(entry + 1, entry->nla_len - 4, ATTR(RES_LQPN))) == rc->qp_num);
	}

	CHECK(list(COMMAND(RES_QP_GET), ATTR(RES_QP), found, 4) == 2);
	for (int i = 0; i < 2; i++) {
		struct object *it = found + i, alone;
		bool is_rc = get(it, ATTR(RES_LQPN)) == rc->qp_num;

		CHECK(is_rc || get(it, ATTR(RES_LQPN)) == ud->qp_num);
		CHECK(get(it, ATTR(RES_TYPE)) == (is_rc ? IBV_QPT_RC : IBV_QPT_UD));
		CHECK(get(it, ATTR(RES_STATE)) == (is_rc ? IBV_QPS_INIT : IBV_QPS_RESET));
		CHECK(has(it, ATTR(RES_RQPN)) == is_rc && has(it, ATTR(RES_RQ_PSN)) == is_rc);
		CHECK(has(it, ATTR(RES_PATH_MIG_STATE)) == is_rc);
		CHECK(has(it, ATTR(PORT_INDEX)) == is_rc);
		CHECK(get(it, ATTR(RES_SQ_PSN)) == 0 && get(it, ATTR(RES_PDN)) == pdn);
		CHECK(one(COMMAND(RES_QP_GET), ATTR(RES_LQPN), get(it, ATTR(RES_LQPN)), &alone) ==
		      EINVAL);
		port = 1;
		CHECK(one(COMMAND(RES_QP_GET), ATTR(RES_LQPN), get(it, ATTR(RES_LQPN)), &alone) ==
		      (is_rc ? 0 : EAGAIN));
		port = 0;
		if (!is_rc)
			continue;
		CHECK(get(&alone, ATTR(RES_STATE)) == get(it, ATTR(RES_STATE)));
		CHECK(has(&alone, ATTR(DEV_NAME)) && get(&alone, ATTR(RES_PDN)) == pdn);
	}
	port = 1;
	CHECK(list(COMMAND(RES_QP_GET), ATTR(RES_QP), found, 4) == 1);
	CHECK(get(found, ATTR(RES_LQPN)) == rc->qp_num);
	CHECK(one(COMMAND(RES_QP_GET), ATTR(RES_LQPN), 0xfffffe, found) == ENOENT);
	CHECK(one(COMMAND(RES_CQ_GET), ATTR(RES_CQN), cqn, found) == EINVAL);
	port = 0;
	CHECK(one(COMMAND(RES_CQ_GET), ATTR(RES_CQN), 0xfffffe, found) == ENOENT);
	CHECK(!one(COMMAND(RES_CQ_GET), ATTR(RES_CQN), cqn, found));
	CHECK(get(found, ATTR(RES_CQE)) == cq->cqe);

	/* More than a socket holds. */
	for (int i = 0; i < count; i++)
		many[i] = new_qp(pd, cq, srq, IBV_QPT_RC);
	CHECK(list(COMMAND(RES_QP_GET), ATTR(RES_QP), found, 4) == count + 2);
	CHECK(list(COMMAND(RES_SRQ_GET), ATTR(RES_SRQ), found, 4) == 1);
	for (int i = 0; i < count; i++)
		CHECK(!ibv_destroy_qp(many[i]));

	CHECK(!ibv_destroy_qp(rc) && !ibv_destroy_qp(ud) && !ibv_destroy_srq(srq));
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
	CHECK(list(COMMAND(RES_QP_GET), ATTR(RES_QP), found, 4) == 0);
	CHECK(list(COMMAND(RES_CTX_GET), ATTR(RES_CTX), found, 4) == 0);
	summary(now);
	CHECK(!memcmp(before, now, sizeof now) || !alone);
}

#ifdef WITH_CM
/* A listening id at an address that the device has. */
static void ids(const char *address)
{
	static struct object found[2];
	struct rdma_event_channel *channel = rdma_create_event_channel();
	struct sockaddr_in at = {.sin_family = AF_INET};
	struct rdma_cm_id *id;
	struct nlattr *source;
	int before;

	CHECK(channel && inet_pton(AF_INET, address, &at.sin_addr) == 1);
	CHECK(!rdma_create_id(channel, &id, NULL, RDMA_PS_TCP));
	before = list(COMMAND(RES_CM_ID_GET), ATTR(RES_CM_ID), found, 2);
	CHECK(before == 0);
	CHECK(!rdma_bind_addr(id, (void *)&at) && !rdma_listen(id, 1));
	CHECK(list(COMMAND(RES_CM_ID_GET), ATTR(RES_CM_ID), found, 2) == 1);
	CHECK(get(found, ATTR(PORT_INDEX)) == 1 && get(found, ATTR(RES_PS)) == RDMA_PS_TCP);
	/* RDMA_CM_LISTEN */
	CHECK(get(found, ATTR(RES_STATE)) == 8 && !has(found, ATTR(RES_LQPN)));
	source = find(found->bytes, found->length, ATTR(RES_SRC_ADDR));
	CHECK(source && source->nla_len == 4 + 128);
	at.sin_port = rdma_get_src_port(id);
	CHECK(at.sin_port && !memcmp(source + 1, &at, 8));
	source = find(found->bytes, found->length, ATTR(RES_DST_ADDR));
	CHECK(source && *(uint16_t *)(source + 1) == AF_INET);
	CHECK(!rdma_destroy_id(id));
	CHECK(list(COMMAND(RES_CM_ID_GET), ATTR(RES_CM_ID), found, 2) == 0);
	rdma_destroy_event_channel(channel);
}
#endif

int main(int argc, char **argv)
{
	struct ibv_device **all = ibv_get_device_list(NULL), *of = NULL;
	const char *wanted = getenv("RXE_DEV");
	struct object it;

	for (int i = 0; all && all[i]; i++)
		if (!of && (!wanted || !strcmp(wanted, ibv_get_device_name(all[i]))))
			of = all[i];
	CHECK(of);
	device_name = ibv_get_device_name(of);
	nl = socket(AF_NETLINK, SOCK_RAW | SOCK_CLOEXEC, NETLINK_RDMA);
	CHECK(nl >= 0);
	for (;; device++) {
		struct nlattr *name;

		if (one(COMMAND(GET), 0, 0, &it))
			continue;
		name = find(it.bytes, it.length, ATTR(DEV_NAME));
		if (name && !strcmp((char *)(name + 1), device_name))
			break;
	}
	counters();
	objects(of, argc > 2 ? atoi(argv[2]) : 100, argc > 1);
#ifdef WITH_CM
	if (argc > 1)
		ids(argv[1]);
#endif
	puts("well");
	return 0;
}
