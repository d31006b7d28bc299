import java.util.Random;
import java.util.StringJoiner;
import org.apache.flink.api.common.eventtime.WatermarkStrategy;
import org.apache.flink.api.common.externalresource.ExternalResourceInfo;
import org.apache.flink.api.common.functions.OpenContext;
import org.apache.flink.api.common.functions.RichMapFunction;
import org.apache.flink.api.connector.source.lib.NumberSequenceSource;
import org.apache.flink.streaming.api.environment.StreamExecutionEnvironment;

/**
 * Multiplies a matrix with vectors, in as many subtasks as the job has, each of which says which device it has.
 *
 * <p>A stock job: it knows Flink's external resources and nothing of Outfitter. Arguments: how many vectors, and the
 * milliseconds that each takes besides. A product that is computed on a GPU would stand in {@code map}.
 */
public final class MatrixVectorJob {

    private static final int SIZE = 64;

    private MatrixVectorJob() {}

    public static void main(String[] arguments) throws Exception {
        long vectors = Long.parseLong(arguments[0]);
        StreamExecutionEnvironment env = StreamExecutionEnvironment.getExecutionEnvironment();
        env.fromSource(new NumberSequenceSource(1, vectors), WatermarkStrategy.noWatermarks(), "numbers")
                .map(new Multiply(Long.parseLong(arguments[1])))
                .print();
        env.execute("matrix-vector");
    }

    /** One row of the product of the matrix with the vector {@code (n, n, ...)}. */
    private static final class Multiply extends RichMapFunction<Long, String> {

        private static final long serialVersionUID = 1L;

        private final long milliseconds;
        private transient String device;
        private transient double[][] matrix;

        Multiply(long milliseconds) {
            this.milliseconds = milliseconds;
        }

        @Override
        public void open(OpenContext context) {
            int subtask = getRuntimeContext().getTaskInfo().getIndexOfThisSubtask();
            StringJoiner properties = new StringJoiner(" ");
            for (ExternalResourceInfo info : getRuntimeContext().getExternalResourceInfos("gpu")) {
                device = info.getProperty("index").orElse("?");
                info.getKeys().stream().sorted().forEach(key -> properties.add(key + "=" + info.getProperty(key).get()));
            }
            System.out.println("subtask " + subtask + " of process " + ProcessHandle.current().pid() + " has: " + properties);
            matrix = new double[SIZE][];
            for (int row = 0; row < SIZE; row++) {
                matrix[row] = new Random(row).doubles(SIZE).toArray();
            }
        }

        @Override
        public String map(Long number) throws InterruptedException {
            Thread.sleep(milliseconds);
            double largest = 0;
            for (double[] row : matrix) {
                double product = 0;
                for (double value : row) {
                    product += value * number;
                }
                largest = Math.max(largest, product);
            }
            return String.format("vector %d on gpu %s: at most %.1f", number, device, largest);
        }
    }
}
