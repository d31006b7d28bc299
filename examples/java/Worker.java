import com.fasterxml.jackson.core.JsonProcessingException;
import com.fasterxml.jackson.databind.*;
import java.nio.file.*;
import java.time.Duration;
import java.util.*;
import java.util.concurrent.*;
import java.util.concurrent.atomic.AtomicBoolean;
import java.util.stream.Stream;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.clients.producer.*;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.*;

/** Borrows devices with Kafka's own client. Arguments: BOOTSTRAP HOST WORKER RESOURCE=AMOUNT [LEASE_SECONDS] */
public final class Worker {
    static final ObjectMapper JSON = new ObjectMapper();
    static final String CLUSTER = System.getenv().getOrDefault("OUTFITTER_CLUSTER", "outfitter");
    static final Path UPTIME = Path.of("/proc/uptime");
    static final AtomicBoolean ended = new AtomicBoolean(); // by a signal, or by ourselves: whichever is first
    static double lease = Double.POSITIVE_INFINITY, aliveAt; // seconds; counts from when we began to send a message
    static boolean isLost(double now) { return now >= aliveAt + lease; }
    // An acknowledgement after the lease's end proves nothing: somebody else may have the devices by then.
    static void acknowledge(double sentAt, double now) { if (!isLost(now)) aliveAt = Math.max(aliveAt, sentAt); }

    static final Map<String, String> WORDS = Map.of("allocated", "yours", "allocated superseded", "over",
        "ended", "over", "releasing", "over", "releasing failed", "failed", "failed", "failed");

    /** What a record in our host's partition means for the worker with the key `own`. */
    static String status(String own, String key, JsonNode record) {
        if (!own.equals(key)) return "skip"; // another worker's, another run's, or a manager's own (@…)
        if (record.isNull()) return "over"; // a tombstone
        if (!record.path("type").asText().equals("allocation")) return "skip";
        String state = record.path("state").asText(), outcome = record.path("outcome").asText();
        return Stream.of(state + " " + outcome, state + " " + record.path("reason_code").asText(), state)
            .map(WORDS::get).filter(Objects::nonNull).findFirst().orElse("waiting"); // states of later versions, too
    }

    static JsonNode parse(String text) {
        try { return JSON.readTree(text == null ? "null" : text); } // null is a tombstone
        catch (JsonProcessingException unreadable) { return JSON.createObjectNode(); } // of no type: skipped
    }

    /** Seconds since boot: most clocks stand still while the machine is suspended, and the lease does not. */
    static double now() throws Exception { return Double.parseDouble(Files.readString(UPTIME).split(" ")[0]); }

    /** Publishes `more` about this `run`. The key is the host: by it Kafka's client finds the partition. */
    static Future<RecordMetadata> publish(Producer<String, String> to, Map<String, String> run, Map<String, ?> more) {
        var message = new TreeMap<String, Object>(run);
        message.putAll(more);
        String text = JSON.valueToTree(message).toString();
        return to.send(new ProducerRecord<>(CLUSTER + ".registrations", run.get("host"), text));
    }

    static void end(Object why) {
        if (ended.compareAndSet(false, true)) System.out.println(why);
        System.exit(1); // runs the shutdown hook
    }

    public static void main(String[] args) throws Exception {
        Thread.setDefaultUncaughtExceptionHandler((thread, error) -> end(error)); // an unreachable broker, for example
        var run = Map.of("host", args[1], "worker", args[2], "incarnation", UUID.randomUUID().toString());
        String own = args[1] + "/" + args[2] + "/" + run.get("incarnation"), ledger = CLUSTER + ".allocations";
        double asked = args.length > 4 ? Double.parseDouble(args[4]) : 30;
        Map<String, Object> settings = Map.of("bootstrap.servers", args[0], "isolation.level", "read_committed",
            "auto.offset.reset", "earliest", "metadata.max.age.ms", 5000,
            "request.timeout.ms", (int) (asked * 333), "max.block.ms", (int) (asked * 333));
        var consumer = new KafkaConsumer<>(settings, new StringDeserializer(), new StringDeserializer());
        var producer = new KafkaProducer<>(settings, new StringSerializer(), new StringSerializer());
        var ends = consumer.endOffsets(consumer.partitionsFor(ledger).stream()
            .map(info -> new TopicPartition(ledger, info.partition())).toList()); // the answer comes behind these
        JsonNode where = parse(System.getenv("WHERE")), amount = parse(args[3].split("=")[1]);
        var resources = Map.of(args[3].split("=")[0], Map.of("amount", amount, "where", where)); // null: any device
        double sentAt = aliveAt = now();
        var beat = publish(producer, run, Map.of("type", "register", "resources", resources, "lease_s", asked));
        var home = new TopicPartition(ledger, beat.get().partition());
        Runtime.getRuntime().addShutdownHook(new Thread(() -> { // once it is over this changes nothing
            boolean signalled = ended.compareAndSet(false, true);
            publish(producer, run, Map.of("type", "deregister", "reason", "the worker ends"));
            producer.close(Duration.ofSeconds(3));
            if (signalled) System.out.println("released");
            Runtime.getRuntime().halt(signalled ? 0 : 1);
        }));
        consumer.assign(List.of(home));
        consumer.seek(home, ends.get(home));
        while (true) {
            for (var record : consumer.poll(Duration.ofMillis(100))) {
                JsonNode body = parse(record.value());
                String status = status(own, record.key(), body);
                if (status.equals("skip")) continue;
                boolean ignored = !where.isNull() && body.path("request").path("choices").isMissingNode();
                if (status.equals("yours") && ignored) end("failed: the manager ignores `where`");
                String line = status + " " + (status.equals("yours") ? body.path("resources") : body.path("reason"));
                if (List.of("over", "failed").contains(status)) end(line); // the devices are no longer ours
                System.out.println(line);
                lease = body.path("request").path("lease_s").asDouble(Double.POSITIVE_INFINITY); // null: no lease
            }
            double now = now();
            try {
                if (beat.isDone() && beat.get().partition() != home.partition()) end("lost: partitions were added");
                if (beat.isDone()) acknowledge(sentAt, now); // once more changes nothing
            } catch (ExecutionException notAcknowledged) { /* the next one may be */ }
            if (isLost(now)) end("lost: no heartbeat was acknowledged for a whole lease"); // no longer ours, either
            boolean due = beat.isDone() && now >= sentAt + lease / 3;
            if (due) { sentAt = now; beat = publish(producer, run, Map.of("type", "heartbeat")); }
        }
    }
}
