/* The GID tables of embedded devices, as the verbs and sysfs show them: argument 1 is the
 * interface that the Ethernet port's GIDs belong to; with argument 2, the device reaches no
 * other hosts. */
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>

#include "check.h"

#define LENGTH 256

static const char *device;

/* Reads a file of the port; returns the error. */
static int contents(const char *directory, int index, char *to, size_t size)
{
	char path[256];
	ssize_t length;
	int fd, error;

	snprintf(path, sizeof path, "/sys/class/infiniband/%s/ports/1/%s/%d", device, directory,
		 index);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return errno == ENOENT ? ENOENT : -errno;
	errno = 0;
	length = read(fd, to, size - 1);
	error = errno;
	CHECK(!close(fd));
	if (length < 0)
		return error;
	CHECK(length > 0 && to[length - 1] == '\n');
	to[length - 1] = 0;
	return 0;
}

static void shows(const struct ibv_gid_entry *entry, const char *interface)
{
	char text[64], expected[64] = "";
	const char *type = entry->gid_type == IBV_GID_TYPE_ROCE_V2 ? "RoCE v2" : "IB/RoCE v1";
	const unsigned char *raw = entry->gid.raw;

	for (int at = 0; at < 16; at += 2)
		sprintf(expected + strlen(expected), "%s%02x%02x", at ? ":" : "", raw[at],
			raw[at + 1]);
	CHECK(!contents("gids", entry->gid_index, text, sizeof text) && !strcmp(text, expected));
	CHECK(!contents("gid_attrs/types", entry->gid_index, text, sizeof text));
	CHECK(!strcmp(text, type));
	if (entry->gid_type == IBV_GID_TYPE_IB) {
		CHECK(entry->ndev_ifindex == 0);
		CHECK(contents("gid_attrs/ndevs", entry->gid_index, text, sizeof text) == EINVAL);
	} else {
		CHECK(entry->ndev_ifindex == if_nametoindex(interface));
		CHECK(!contents("gid_attrs/ndevs", entry->gid_index, text, sizeof text));
		CHECK(!strcmp(text, interface));
	}
}

static void empty(int index)
{
	char text[64];

	CHECK(contents("gid_attrs/types", index, text, sizeof text) == EINVAL);
	CHECK(contents("gid_attrs/ndevs", index, text, sizeof text) == EINVAL);
	CHECK(!contents("gids", index, text, sizeof text));
	CHECK(!strcmp(text, "0000:0000:0000:0000:0000:0000:0000:0000"));
}

/* v1 and v2 of the link-local address, then of the IPv4 address. */
static void ordered(const struct ibv_gid_entry *entries, int found)
{
	static const unsigned char local[] = { 0xfe, 0x80, 0, 0, 0, 0, 0, 0 };
	static const unsigned char mapped[] = { 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 127 };

	CHECK(found == 4);
	for (int index = 0; index < 4; index++) {
		CHECK(entries[index].gid_index == (uint32_t)index);
		CHECK(entries[index].gid_type ==
		      (index % 2 ? IBV_GID_TYPE_ROCE_V2 : IBV_GID_TYPE_ROCE_V1));
		if (index < 2)
			CHECK(!memcmp(entries[index].gid.raw, local, sizeof local));
		else
			CHECK(!memcmp(entries[index].gid.raw, mapped, sizeof mapped));
	}
}

int main(int argc, char **argv)
{
	int count, found;
	struct ibv_device **devices = ibv_get_device_list(&count);
	struct ibv_gid_entry entries[LENGTH];
	struct ibv_port_attr port;
	char text[64];

	CHECK(argc >= 2 && count > 0);
	for (int number = 0; number < count; number++) {
		struct ibv_context *context = ibv_open_device(devices[number]);
		int next = 0;

		CHECK(context && !ibv_query_port(context, 1, &port));
		device = ibv_get_device_name(devices[number]);
		found = ibv_query_gid_table(context, entries, LENGTH, 0);
		CHECK(found > 0 && found <= port.gid_tbl_len);
		for (int at = 0; at < found; at++) {
			while (next < (int)entries[at].gid_index)
				empty(next++);
			shows(&entries[at], argv[1]);
			next++;
		}
		while (next < port.gid_tbl_len)
			empty(next++);
		CHECK(contents("gids", next, text, sizeof text) == ENOENT);
		CHECK(contents("gid_attrs/ndevs", next, text, sizeof text) == ENOENT);
		if (port.link_layer == IBV_LINK_LAYER_INFINIBAND)
			CHECK(port.gid_tbl_len == 8 && found == 1);
		else
			CHECK(port.gid_tbl_len == 128);
		if (port.link_layer == IBV_LINK_LAYER_ETHERNET && argc == 3)
			ordered(entries, found);
		CHECK(!ibv_close_device(context));
	}
	ibv_free_device_list(devices);
	puts("well");
	return 0;
}
