/*
 * Raw packets on a network interface. "raw device" returns UDP packets for a port of the
 * interface's address or of a multicast group to their sender, until one says "end"; "raw peer"
 * sends such packets by sockets of the system, and checks what returns; "raw refused" lacks the
 * right to do the former. Each says "well" if all was as it should be.
 */
#include <arpa/inet.h>
#include <infiniband/verbs.h>
#include <linux/capability.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "check.h"

#define PORT 7777
#define DEVICE "192.0.2.1"
#define PEER "192.0.2.2"
#define GROUP "239.1.2.3"
#define SLOTS 64
#define ROOM 2048
#define IP 14
#define UDP (IP + 20)
#define DATA (UDP + 8)

static const unsigned char group_mac[] = { 1, 0, 0x5e, 1, 2, 3 };

static void mac_of(const char *interface, unsigned char *mac)
{
	struct ifreq request = { 0 };
	int s = socket(AF_INET, SOCK_DGRAM, 0);

	strcpy(request.ifr_name, interface);
	CHECK(!ioctl(s, SIOCGIFHWADDR, &request));
	memcpy(mac, request.ifr_hwaddr.sa_data, 6);
	close(s);
}

static struct ibv_context *open_device(void)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct ibv_context *context;

	CHECK(list && *list);
	CHECK((context = ibv_open_device(*list)));
	return context;
}

static struct ibv_flow *flow_to(struct ibv_qp *qp, const unsigned char *mac)
{
	struct {
		struct ibv_flow_attr attr;
		struct ibv_flow_spec_eth eth;
	} __attribute__((packed, aligned(8))) rule = {
		.attr = { .type = IBV_FLOW_ATTR_NORMAL, .size = sizeof(rule),
			  .num_of_specs = 1, .port = 1 },
		.eth = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(rule.eth) },
	};
	struct ibv_flow *flow;

	memcpy(rule.eth.val.dst_mac, mac, 6);
	memset(rule.eth.mask.dst_mac, 0xff, 6);
	CHECK((flow = ibv_create_flow(qp, &rule.attr)));
	return flow;
}

/* Turns a packet round. Returns its length; 0 if it is no UDP packet for the port. */
static int answer(unsigned char *frame, int length, const unsigned char *mac)
{
	uint16_t port;

	if (length > 18 && frame[12] == 0x81 && !frame[13]) {
		/* The answer has no tag, but the tag's number before the data. */
		unsigned char number = frame[15];

		memmove(frame + 12, frame + 16, length - 16);
		length -= 4;
		if (length > DATA)
			frame[DATA] = number;
	}
	if (length <= DATA || frame[12] != 8 || frame[13] || frame[IP] != 0x45 ||
	    frame[IP + 9] != 17)
		return 0;
	memcpy(&port, frame + UDP + 2, 2);
	if (port != htons(PORT))
		return 0;
	memcpy(frame, frame + 6, 6);
	memcpy(frame + 6, mac, 6);
	memcpy(frame + IP + 16, frame + IP + 12, 4);
	CHECK(inet_pton(AF_INET, DEVICE, frame + IP + 12) == 1);
	memcpy(frame + UDP + 2, frame + UDP, 2);
	memcpy(frame + UDP, &port, 2);
	return length;
}

static void serve(void)
{
	struct ibv_context *context = open_device();
	struct ibv_pd *pd = ibv_alloc_pd(context);
	struct ibv_cq *cq = ibv_create_cq(context, 2 * SLOTS, NULL, NULL, 0);
	struct ibv_qp_init_attr init = { .send_cq = cq, .recv_cq = cq,
					 .qp_type = IBV_QPT_RAW_PACKET,
					 .cap = { SLOTS, SLOTS, 1, 1, 0 } };
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_INIT, .port_num = 1 };
	unsigned char *memory = aligned_alloc(4096, SLOTS * ROOM);
	unsigned char mac[6];
	struct ibv_mr *mr;
	struct ibv_qp *qp;
	struct ibv_flow *flows[2];
	time_t end = time(NULL) + 60;
	int ends = 0, sends = 0;

	mac_of("veth0", mac);
	CHECK(pd && cq && memory);
	CHECK((mr = ibv_reg_mr(pd, memory, SLOTS * ROOM, IBV_ACCESS_LOCAL_WRITE)));
	CHECK((qp = ibv_create_qp(pd, &init)));
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE | IBV_QP_PORT));
	attr.qp_state = IBV_QPS_RTR;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	attr.qp_state = IBV_QPS_RTS;
	CHECK(!ibv_modify_qp(qp, &attr, IBV_QP_STATE));
	for (int slot = 0; slot < SLOTS; slot++) {
		struct ibv_sge sge = { (uintptr_t)memory + slot * ROOM, ROOM, mr->lkey };
		struct ibv_recv_wr wr = { .wr_id = slot, .sg_list = &sge, .num_sge = 1 }, *bad;

		CHECK(!ibv_post_recv(qp, &wr, &bad));
	}
	flows[0] = flow_to(qp, mac);
	flows[1] = flow_to(qp, group_mac);
	while (!ends || sends) {
		struct ibv_wc wc;
		struct ibv_sge sge = { 0, ROOM, mr->lkey };
		unsigned char *frame;
		int length;

		CHECK(time(NULL) < end);
		if (ibv_poll_cq(cq, 1, &wc) != 1)
			continue;
		CHECK(wc.status == IBV_WC_SUCCESS);
		frame = memory + wc.wr_id * ROOM;
		sge.addr = (uintptr_t)frame;
		if (wc.opcode == IBV_WC_RECV &&
		    (length = answer(frame, wc.byte_len, mac))) {
			struct ibv_send_wr wr = { .wr_id = wc.wr_id, .sg_list = &sge, .num_sge = 1,
						  .opcode = IBV_WR_SEND,
						  .send_flags = IBV_SEND_SIGNALED |
								IBV_SEND_IP_CSUM }, *bad;

			CHECK(wc.wc_flags & IBV_WC_IP_CSUM_OK);
			ends |= !memcmp(frame + DATA, "end", 3);
			sge.length = length;
			sends++;
			CHECK(!ibv_post_send(qp, &wr, &bad));
		} else {
			struct ibv_recv_wr wr = { .wr_id = wc.wr_id, .sg_list = &sge,
						  .num_sge = 1 }, *bad;

			sends -= wc.opcode == IBV_WC_SEND;
			CHECK(!ibv_post_recv(qp, &wr, &bad));
		}
	}
	CHECK(!ibv_destroy_flow(flows[0]) && !ibv_destroy_flow(flows[1]));
	CHECK(!ibv_destroy_qp(qp));
	CHECK(!ibv_dereg_mr(mr) && !ibv_destroy_cq(cq) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
}

/* Sends data, in datagrams of a size, until as much returns unchanged. */
static void exchange(int s, const char *to, const char *data, int length, int size)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	int count = (length + size - 1) / size;
	time_t end = time(NULL) + 60;

	CHECK(inet_pton(AF_INET, to, &address.sin_addr) == 1);
	CHECK(!setsockopt(s, SOL_UDP, 103 /* UDP_SEGMENT */, &(int){ count > 1 ? size : 0 }, 4));
	for (int seen = 0; seen != (1 << count) - 1;) {
		struct pollfd wait = { .fd = s, .events = POLLIN };
		char returned[ROOM];

		CHECK(time(NULL) < end);
		CHECK(sendto(s, data, length, 0, (struct sockaddr *)&address,
			     sizeof(address)) == length);
		while (seen != (1 << count) - 1 && poll(&wait, 1, 200) == 1) {
			int n = recv(s, returned, sizeof(returned), 0);

			for (int at = 0; at < count; at++) {
				int rest = length - at * size;

				if (n == (rest < size ? rest : size) &&
				    !memcmp(returned, data + at * size, n))
					seen |= 1 << at;
			}
		}
	}
}

/* Sends a packet with a VLAN tag of number 9. */
static void send_tagged(const unsigned char *mac)
{
	unsigned char frame[64] = { [12] = 0x81, 0, 0, 9, 8, 0, 0x45, [26] = 64, 17 };
	struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_halen = 6,
				       .sll_ifindex = if_nametoindex("veth0") };
	int s = socket(AF_PACKET, SOCK_RAW, 0), total = htons(33), length = htons(13);
	int port = htons(PORT);
	uint32_t sum = 0;

	CHECK(s >= 0);
	memcpy(frame, mac, 6);
	mac_of("veth0", frame + 6);
	memcpy(frame + 20, &total, 2);
	CHECK(inet_pton(AF_INET, PEER, frame + 30) == 1);
	CHECK(inet_pton(AF_INET, DEVICE, frame + 34) == 1);
	for (int at = 18; at < 38; at += 2)
		sum += frame[at] << 8 | frame[at + 1];
	sum = ~((sum & 0xffff) + (sum >> 16));
	frame[28] = sum >> 8;
	frame[29] = sum;
	memcpy(frame + 38, &port, 2);
	memcpy(frame + 40, &port, 2);
	memcpy(frame + 42, &length, 2);
	memcpy(frame + 46, "?oken", 5);
	CHECK(sendto(s, frame, sizeof(frame), 0, (struct sockaddr *)&address,
		     sizeof(address)) == sizeof(frame));
	close(s);
}

/* The address that the system has learned. */
static void learned_mac(unsigned char *mac)
{
	FILE *table = fopen("/proc/net/arp", "r");
	char line[256], text[64];
	unsigned parts[6];

	CHECK(table);
	while (fgets(line, sizeof(line), table)) {
		if (strncmp(line, DEVICE " ", sizeof(DEVICE)))
			continue;
		CHECK(sscanf(line, "%*s %*s %*s %63s", text) == 1);
		CHECK(sscanf(text, "%x:%x:%x:%x:%x:%x", parts, parts + 1, parts + 2, parts + 3,
			     parts + 4, parts + 5) == 6);
	}
	for (int at = 0; at < 6; at++)
		mac[at] = parts[at];
	fclose(table);
}

static void talk(void)
{
	struct sockaddr_in own = { .sin_family = AF_INET, .sin_port = htons(PORT) };
	int s = socket(AF_INET, SOCK_DGRAM, 0);
	struct pollfd wait = { .fd = s, .events = POLLIN };
	unsigned char mac[6];
	char data[2500];

	CHECK(inet_pton(AF_INET, PEER, &own.sin_addr) == 1);
	CHECK(!bind(s, (struct sockaddr *)&own, sizeof(own)));
	CHECK(!setsockopt(s, IPPROTO_IP, IP_MULTICAST_IF, &own.sin_addr, 4));
	for (unsigned at = 0; at < sizeof(data); at++)
		data[at] = at * 7 + at / 1000;
	exchange(s, DEVICE, "hello", 5, 5);
	exchange(s, DEVICE, data, sizeof(data), 1000);
	exchange(s, GROUP, "group", 5, 5);
	while (poll(&wait, 1, 300) == 1)
		recv(s, data, sizeof(data), 0);
	learned_mac(mac);
	send_tagged(mac);
	CHECK(poll(&wait, 1, 60000) == 1);
	CHECK(recv(s, data, sizeof(data), 0) == 5 && !memcmp(data, "\x09oken", 5));
	exchange(s, DEVICE, "end", 3, 3);
}

static void be_refused(void)
{
	struct __user_cap_header_struct header = { _LINUX_CAPABILITY_VERSION_3, 0 };
	struct __user_cap_data_struct data[2];
	struct ibv_context *context;
	struct ibv_qp_init_attr init = { .qp_type = IBV_QPT_RAW_PACKET, .cap = { 1, 1, 1, 1, 0 } };
	struct ibv_pd *pd;

	CHECK(!syscall(SYS_capget, &header, data));
	data[0].effective &= ~(1 << CAP_NET_RAW);
	data[0].permitted &= ~(1 << CAP_NET_RAW);
	data[0].inheritable &= ~(1 << CAP_NET_RAW);
	CHECK(!syscall(SYS_capset, &header, data));
	context = open_device();
	CHECK((pd = ibv_alloc_pd(context)));
	init.send_cq = init.recv_cq = ibv_create_cq(context, 2, NULL, NULL, 0);
	for (int n = 0; n < 2; n++) {
		errno = 0;
		CHECK(!ibv_create_qp(pd, &init) && errno == EPERM);
	}
	CHECK(!ibv_destroy_cq(init.send_cq) && !ibv_dealloc_pd(pd));
	CHECK(!ibv_close_device(context));
}

int main(int argc, char **argv)
{
	const char *mode = argc > 1 ? argv[1] : "";

	if (!strcmp(mode, "device"))
		serve();
	else if (!strcmp(mode, "peer"))
		talk();
	else
		be_refused();
	puts("well");
	return 0;
}
