/*
 * What a device and a node show: a line for each fact, by verbs, DevX (if the provider is
 * libmlx5) and sysfs, in the ways in which programs read them.
 */
#include <dirent.h>
#include <endian.h>
#include <fcntl.h>
#include <infiniband/mlx5dv.h>
#include <infiniband/verbs.h>
#include <limits.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "check.h"

static void show_file(const char *directory, const char *name)
{
	char path[PATH_MAX], text[4096] = "";
	int fd, n;

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	fd = open(path, O_RDONLY);
	n = fd < 0 ? -1 : (int)read(fd, text, sizeof(text) - 1);
	if (n > 0 && text[n - 1] == '\n')
		text[n - 1] = 0;
	printf("%s: %s\n", strrchr(path, '/') + 1, n < 0 ? "none" : text);
	if (fd >= 0)
		close(fd);
}

/* As DPDK and hwloc read them. */
static void show_function(const char *path)
{
	char name[PATH_MAX], line[256];
	unsigned long long start, end, flags;
	unsigned char config[4];
	int lines = 0;
	FILE *file;

	snprintf(name, sizeof(name), "%s/resource", path);
	CHECK((file = fopen(name, "r")));
	for (; fgets(line, sizeof(line), file); lines++)
		CHECK(sscanf(line, "0x%llx 0x%llx 0x%llx\n", &start, &end, &flags) == 3);
	CHECK(!fclose(file));
	printf("resource: %d lines\n", lines);
	snprintf(name, sizeof(name), "%s/config", path);
	CHECK((file = fopen(name, "r")) && fread(config, sizeof(config), 1, file) == 1);
	CHECK(!fclose(file));
	printf("config: %02x %02x %02x %02x\n", config[0], config[1], config[2], config[3]);
}

static void show_link(const char *what, const char *path)
{
	char real[PATH_MAX];

	printf("%s: %s\n", what, realpath(path, real) ? real : "none");
}

static void show_device(struct ibv_device *device)
{
	static const char *const files[] = { "hca_type", "hw_rev", "board_id", "fw_ver",
					     "ports/1/rate", "ports/1/gid_attrs/ndevs/0",
					     "device/device", "device/numa_node",
					     "device/local_cpulist", "device/max_link_speed" };
	struct ibv_context *context = ibv_open_device(device);
	struct ibv_device_attr attr;
	struct ibv_port_attr port;
	unsigned char in[16] = { 1, 0, 0, 0, 0, 0, 0, 1 }, out[0x1010] = { 0 };
	char path[PATH_MAX];

	CHECK(context && !ibv_query_device(context, &attr));
	CHECK(!ibv_query_port(context, 1, &port));
	printf("%s: %u %u %s %#x\n", ibv_get_device_name(device), attr.vendor_part_id, attr.hw_ver,
	       attr.fw_ver, attr.device_cap_flags);
	printf("limits: %d %d %d %d %d %d\n", attr.max_qp, attr.max_cq, attr.max_mr, attr.max_pd,
	       attr.max_srq, attr.max_mcast_grp);
	printf("speed: %d\n", port.active_speed);
	/* QUERY_HCA_CAP of the general capabilities. */
	if (!mlx5dv_devx_general_cmd(context, in, sizeof(in), out, sizeof(out)))
		printf("log_max_qp: %d\n", out[16 + 0x13] & 31);
	for (unsigned at = 0; at < sizeof(files) / sizeof(*files); at++) {
		snprintf(path, sizeof(path), "/sys/class/infiniband/%s",
			 ibv_get_device_name(device));
		show_file(path, files[at]);
	}
	strcat(path, "/device");
	show_link("place", path);
	show_function(path);
	strcat(path, "/driver");
	show_link("driver", path);
	CHECK(!ibv_close_device(context));
}

/* As libnuma reads the NUMA nodes that a process may use. */
static void show_allowed(void)
{
	char line[4096];
	FILE *file = fopen("/proc/self/status", "r");

	CHECK(file);
	while (fgets(line, sizeof(line), file))
		if (!strncmp(line, "Mems_allowed", 12) || !strncmp(line, "Pid", 3))
			printf("status: %s", line);
	CHECK(!fclose(file));
}

int main(int argc, char **argv)
{
	struct ibv_device **list = ibv_get_device_list(NULL);
	struct dirent **entries;
	int count;

	CHECK(list && *list);
	for (; *list; list++)
		show_device(*list);
	/* As NCCL finds a GPU, and hwloc bridges. */
	if (argc > 1) {
		show_link("gpu", "/sys/class/pci_bus/0000:19/../../0000:19:00.0");
		show_file("/sys/class/pci_bus/0000:19/../../0000:19:00.0", "class");
		show_file("/sys/devices/system/node/node0", "cpumap");
	}
	show_allowed();
	count = scandir("/sys/bus/pci/devices", &entries, NULL, alphasort);
	for (int at = 0; at < count; at++)
		if (entries[at]->d_name[0] != '.')
			printf("function: %s\n", entries[at]->d_name);
	return 0;
}
