// A worker that borrows devices with franz-go. Arguments: BOOTSTRAP HOST WORKER RESOURCE=AMOUNT [LEASE_SECONDS]
package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
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

type lease struct{ seconds, aliveAt float64 } // 0: none; counts from when we began to send a message

func (l lease) isLost(now float64) bool { return l.seconds > 0 && now >= l.aliveAt+l.seconds }

func (l *lease) acknowledge(sentAt, now float64) {
	if !l.isLost(now) { // else it proves nothing: somebody else may have the devices by now
		l.aliveAt = max(l.aliveAt, sentAt)
	}
}

type record struct {
	Type, State, Outcome, Reason string
	Code                         string `json:"reason_code"`
	Request                      struct {
		LeaseS float64 `json:"lease_s"` // null: no lease
	}
	Resources json.RawMessage
}

var words = map[string]string{"allocated": "yours", "allocated superseded": "over", "ended": "over",
	"releasing": "over", "releasing failed": "failed", "failed": "failed"}

// What a record in our host's partition means for the worker with the key own.
func status(own, key string, value []byte) (word string, r record) {
	if value == nil && own == key { // a tombstone
		return "over", r
	} else if own != key || json.Unmarshal(value, &r) != nil || r.Type != "allocation" {
		return "skip", r // another worker's, another run's, a manager's own (@...), or of a later version
	}
	return cmp.Or(words[r.State+" "+r.Outcome], words[r.State+" "+r.Code], words[r.State], "waiting"), r
}

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
	publish := func(kind, more string, within time.Duration) (partition int32) { // -1: not acknowledged in time
		body := fmt.Sprintf(`{"type":%q,"host":%q,"worker":%q,"incarnation":%q%s}`, kind, host, worker, run, more)
		acknowledged := make(chan int32, 1) // the key is the host, by which the client finds the partition
		client.Produce(context.Background(), kgo.KeySliceRecord([]byte(host), []byte(body)), func(r *kgo.Record, err error) {
			if err == nil {
				acknowledged <- r.Partition
			}
		})
		select {
		case partition = <-acknowledged:
			return partition
		case <-time.After(within):
			return -1
		}
	}
	leave := func(code int, why ...any) {
		fmt.Println(why...)
		publish("deregister", `,"reason":"the worker ends"`, 3*time.Second) // if it is over, this changes nothing
		os.Exit(code)
	}
	ends := must(kadm.NewClient(client).ListEndOffsets(stop, ledger)) // the answer comes behind them
	ours := lease{aliveAt: now()}
	sentAt, request := ours.aliveAt, fmt.Sprintf(`,"resources":{%q:{"amount":%s}},"lease_s":%s`, resource, amount, asked)
	home := publish("register", request, 30*time.Second)
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
				fmt.Println(word, r.Reason, string(r.Resources))
				ours.seconds = r.Request.LeaseS
			case "over", "failed":
				leave(1, word, r.Reason) // the devices are no longer ours
			}
		})
		cancel()
		if third := ours.seconds / 3; third > 0 && now() >= sentAt+third {
			sentAt = now()
			switch publish("heartbeat", "", time.Duration(third*float64(time.Second))) {
			case home:
				ours.acknowledge(sentAt, now())
			case -1: // the next one may be acknowledged
			default:
				leave(1, "lost: partitions were added")
			}
		}
		if ours.isLost(now()) {
			leave(1, "lost: no heartbeat was acknowledged for a whole lease") // the devices are no longer ours, either
		}
	}
	leave(0, "released")
}
