package main

import (
	"encoding/json"
	"os"
	"testing"

	"github.com/twmb/franz-go/pkg/kgo"
)

// The folder with the vectors is the environment's VECTORS. The number of checks is printed, so that none is left out.
type row struct {
	Name, Key, Then, Text, Host, Only string
	Partition, Partitions             int
	Value                             *json.RawMessage
	Records                           []row
	LeaseS                            float64 `json:"lease_s"`
	Registered                        float64 `json:"registered_at"`
	Steps                             []step
}

type step struct {
	At           float64
	Then         string
	Acknowledged *float64
}

type file struct {
	Host, Worker, Incarnation string
	Partition                 int
	Vectors                   []row
}

func load(t *testing.T, name string) (f file) {
	text := must(os.ReadFile(os.Getenv("VECTORS") + "/" + name + ".json"))
	if err := json.Unmarshal(text, &f); err != nil {
		t.Fatal(err)
	}
	return f
}

// word of a row; the example reads the host's partition only.
func word(f file, r row) string {
	own := f.Host + "/" + f.Worker + "/" + f.Incarnation
	if r.Partition != f.Partition {
		return "skip"
	}
	var value []byte
	if r.Value != nil {
		value = *r.Value
	} else if r.Text != "" || r.Name == "nothing at all" {
		value = []byte(r.Text)
	}
	word, _ := status(own, r.Key, value)
	return word
}

func TestVectors(t *testing.T) {
	checked := 0
	check := func(name string, expected, actual any) {
		checked++
		if expected != actual {
			t.Errorf("%s: %v instead of %v", name, actual, expected)
		}
	}
	records := load(t, "records")
	for _, r := range records.Vectors {
		check(r.Name, r.Then, word(records, r))
	}
	for _, v := range load(t, "sequences").Vectors {
		if v.Only != "" { // the example never registers again
			continue
		}
		now := "waiting"
		for _, r := range v.Records {
			if next := word(records, r); next != "skip" && now != "over" && now != "failed" {
				now = next
			}
			check(v.Name, r.Then, now)
		}
	}
	for _, v := range load(t, "leases").Vectors {
		ours := lease{seconds: v.LeaseS, aliveAt: v.Registered}
		for _, s := range v.Steps {
			if s.Acknowledged != nil {
				ours.acknowledge(*s.Acknowledged, s.At)
			}
			check(v.Name, s.Then == "lost", ours.isLost(s.At))
		}
	}
	for _, v := range load(t, "partitions").Vectors {
		partitioner := kgo.StickyKeyPartitioner(nil).ForTopic("outfitter.registrations")
		check(v.Host, v.Partition, partitioner.Partition(kgo.KeySliceRecord([]byte(v.Host), nil), v.Partitions))
	}
	t.Log(checked, "checked")
}
