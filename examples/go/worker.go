// A worker that borrows devices with franz-go. Arguments: BOOTSTRAP HOST WORKER RESOURCE=AMOUNT [LEASE_SECONDS]
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"fmt"
	"log"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"

	"github.com/twmb/franz-go/pkg/kadm"
	"github.com/twmb/franz-go/pkg/kgo"
)

func now() (seconds float64) { // since boot: most clocks stand still while the machine is suspended
	uptime, _ := os.ReadFile("/proc/uptime")
	fmt.Sscan(string(uptime), &seconds)
	return seconds
}

func must[T any](value T, err error) T {
	if err != nil {
		log.Fatal(err) // exit code 1
	}
	return value
}

func main() {
	host, worker, run, cluster := os.Args[2], os.Args[3], rand.Text(), cmp.Or(os.Getenv("OUTFITTER_CLUSTER"), "outfitter")
	resource, amount, _ := strings.Cut(os.Args[4], "=")
	own, ledger, asked := host+"/"+worker+"/"+run, cluster+".allocations", append(os.Args, "30")[5]
	stop, _ := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	client := must(kgo.NewClient(kgo.SeedBrokers(strings.Split(os.Args[1], ",")...), kgo.MetadataMaxAge(5*time.Second),
		kgo.FetchIsolationLevel(kgo.ReadCommitted()), kgo.DefaultProduceTopic(cluster+".registrations")))
	// Returns the partition, or -1 if nothing was acknowledged within so many seconds. The key is the host.
	publish := func(kind, more string, within float64) int32 {
		body := fmt.Sprintf(`{"type":%q,"host":%q,"worker":%q,"incarnation":%q%s}`, kind, host, worker, run, more)
		acknowledged := make(chan int32, 1)
		client.Produce(context.Background(), kgo.KeySliceRecord([]byte(host), []byte(body)), func(r *kgo.Record, err error) {
			if err == nil {
				acknowledged <- r.Partition
			}
		})
		select {
		case partition := <-acknowledged:
			return partition
		case <-time.After(time.Duration(within * float64(time.Second))):
			return -1
		}
	}
	leave := func(code int, why ...any) {
		fmt.Println(why...)
		publish("deregister", `,"reason":"the worker ends"`, 3) // if it is over, this changes nothing
		os.Exit(code)
	}
	ends := must(kadm.NewClient(client).ListEndOffsets(stop, ledger)) // the answer comes behind them
	ours := lease{aliveAt: now()}
	where := cmp.Or(os.Getenv("WHERE"), "null") // which devices, as JSON
	wanted := fmt.Sprintf(`{%q:{"amount":%s,"where":%s}}`, resource, amount, where)
	sentAt, request := ours.aliveAt, fmt.Sprintf(`,"resources":%s,"lease_s":%s`, wanted, asked)
	home := publish("register", request, 30)
	if home < 0 {
		log.Fatal("the registration was not acknowledged")
	}
	end, _ := ends.Lookup(ledger, home)
	client.AddConsumePartitions(map[string]map[int32]kgo.Offset{ledger: {home: kgo.NewOffset().At(end.Offset)}})
	for stop.Err() == nil {
		soon, cancel := context.WithTimeout(stop, 100*time.Millisecond)
		client.PollFetches(soon).EachRecord(func(fetched *kgo.Record) {
			word, r := status(own, string(fetched.Key), fetched.Value)
			switch word {
			case "waiting", "yours":
				if word == "yours" && where != "null" && r.Request.Choices == nil {
					leave(1, "failed: the manager ignores `where`")
				}
				fmt.Println(word, map[string]string{"waiting": r.Reason, "yours": string(r.Resources)}[word])
				ours.seconds = r.Request.LeaseS
			case "over", "failed":
				leave(1, word, r.Reason) // the devices are no longer ours
			}
		})
		cancel()
		if third := ours.seconds / 3; third > 0 && now() >= sentAt+third {
			sentAt = now()
			within := min(third, ours.aliveAt+ours.seconds-sentAt) // no longer than the lease
			if partition := publish("heartbeat", "", within); partition == home {
				ours.acknowledge(sentAt, now())
			} else if partition >= 0 {
				leave(1, "lost: partitions were added")
			}
		}
		if ours.isLost(now()) {
			leave(1, "lost: no heartbeat was acknowledged for a whole lease") // the devices are no longer ours, either
		}
	}
	leave(0, "released")
}
